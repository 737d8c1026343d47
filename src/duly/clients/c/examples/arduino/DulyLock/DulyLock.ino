/* A lock on an ESP32 with Arduino: 'lock_control' with {"open": true} turns the motor for half a second.
 *
 * Copy duly.h and duly.c into this folder, and fill in the eight lines below. The partition "spiffs" of the default
 * table is used as flash: what a file system keeps there is erased. */

#include <WiFi.h>
#include <esp_partition.h>
#include <esp_random.h>
#include <esp_timer.h>
#include <sys/time.h>

#include "duly.h"

static const char *const WIFI_NAME = "";
static const char *const WIFI_PASSWORD = "";
static const char *const BROKER = "192.168.1.5";
static const uint16_t PORT = 7883;
static const char *const NAME = "lock-1"; /* as in 'duly add device' */
static const char *const TOKEN = "";
static const char *const KEY = ""; /* if it was added with '--key shared' */
static const uint8_t PIN = 5;

static const uint32_t AREAS = 2, AREA_SIZE = 32768;
static const time_t YEAR_2024 = 1704067200;

static WiFiClient client;
static const esp_partition_t *flash;
static duly device;
static duly_port port;
static bool usable, is_open;

/* ── what the board provides ── */

static bool open_client(void *) {
  if (WiFi.status() != WL_CONNECTED) return false;
  if (!client.connect(BROKER, PORT, 5000)) {
    Serial.printf("lock: cannot reach %s:%u; trying again\n", BROKER, (unsigned)PORT);
    return false;
  }
  client.setNoDelay(true); /* else an answer waits 40 ms */
  return true;
}

static int read_client(void *, uint8_t *bytes, size_t size) {
  if (client.available() > 0 && size) return client.read(bytes, size);
  return client.connected() ? 0 : -1;
}

static bool send_client(void *, const uint8_t *bytes, size_t size) { return client.write(bytes, size) == size; }

static void close_client(void *) { client.stop(); }

static uint64_t uptime_ms(void *) { return (uint64_t)esp_timer_get_time() / 1000; }

static uint64_t time_ms(void *) { /* 0 until NTP has set it */
  struct timeval now;
  gettimeofday(&now, nullptr);
  return now.tv_sec < YEAR_2024 ? 0 : (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_usec / 1000;
}

static uint32_t random_bits(void *) { return esp_random(); }

static bool flash_read(void *, uint32_t at, void *bytes, size_t size) {
  return esp_partition_read(flash, at, bytes, size) == ESP_OK;
}

static bool flash_write(void *, uint32_t at, const void *bytes, size_t size) {
  return esp_partition_write(flash, at, bytes, size) == ESP_OK;
}

static bool flash_erase(void *, uint32_t area) {
  return esp_partition_erase_range(flash, area * AREA_SIZE, AREA_SIZE) == ESP_OK;
}

/* ── what the lock does ── */

static int lock_control(duly *, void *, const duly_command *command, char *answer, size_t size) {
  duly_text open = duly_field(command->data, "open");
  if (!duly_is(open, "true") && !duly_is(open, "false")) return DULY_BAD_PARAMETERS;
  digitalWrite(PIN, HIGH);
  delay(500);
  digitalWrite(PIN, LOW);
  is_open = duly_is(open, "true");
  snprintf(answer, size, "{\"open\":%s}", is_open ? "true" : "false");
  return DULY_DONE;
}

static int query(duly *, void *, const duly_command *, char *answer, size_t size) {
  snprintf(answer, size, "{\"open\":%s}", is_open ? "true" : "false");
  return DULY_DONE;
}

void setup() {
  Serial.begin(115200);
  pinMode(PIN, OUTPUT);
  port = {nullptr,     open_client, read_client, send_client, close_client, uptime_ms, time_ms,
          random_bits, flash_read,  flash_write, flash_erase, AREAS,        AREA_SIZE};
  flash = esp_partition_find_first(ESP_PARTITION_TYPE_DATA, ESP_PARTITION_SUBTYPE_ANY, "spiffs");
  usable = flash && flash->size >= AREAS * AREA_SIZE && duly_begin(&device, &port, NAME, TOKEN) &&
           (!KEY[0] || duly_sign_with(&device, KEY));
  if (!usable) {
    Serial.println("lock: the partition 'spiffs' is missing, too small or broken, or the key is none");
    return;
  }
  device.version = "1.0";
  duly_on(&device, "lock_control", DULY_AT_MOST_ONCE, lock_control, nullptr);
  duly_on(&device, "query", DULY_AT_LEAST_ONCE, query, nullptr);
  WiFi.mode(WIFI_STA);
  WiFi.begin(WIFI_NAME, WIFI_PASSWORD);
  configTime(0, 0, "pool.ntp.org");
  Serial.printf("lock: %u bytes of RAM, %u with buffers\n", (unsigned)DULY_RAM, (unsigned)sizeof device);
}

void loop() {
  static duly_state before = DULY_OFFLINE;
  static uint8_t refused = 0;
  if (!usable) return;
  duly_state state = duly_poll(&device);
  if (device.refused && device.refused != refused)
    Serial.printf("lock: the broker refuses %s (code %u): are name and token those of 'duly add device'?\n", NAME,
                  (unsigned)device.refused);
  if (state == DULY_ONLINE && before != DULY_ONLINE) Serial.println("lock: online");
  if (state == DULY_OFFLINE && before == DULY_ONLINE) Serial.println("lock: the connection was lost; trying again");
  refused = device.refused;
  before = state;
  delay(10);
}
