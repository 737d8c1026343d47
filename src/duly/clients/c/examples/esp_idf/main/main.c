/* A lock on an ESP32: 'lock_control' with {"open": true} turns the motor for half a second. */

#include <stdio.h>

#include "driver/gpio.h"
#include "esp_log.h"
#include "esp_port.h"
#include "freertos/FreeRTOS.h"
#include "freertos/task.h"
#include "sdkconfig.h"
#include "wifi.h"

static const char *TAG = "lock";
static duly device;
static esp_port esp;
static bool is_open;

static int lock_control(duly *it, void *context, const duly_command *command, char *answer, size_t size) {
    duly_text open = duly_field(command->data, "open");
    (void)it, (void)context;
    if (!duly_is(open, "true") && !duly_is(open, "false")) return DULY_BAD_PARAMETERS;
    gpio_set_level(CONFIG_LOCK_PIN, 1);
    vTaskDelay(pdMS_TO_TICKS(500));
    gpio_set_level(CONFIG_LOCK_PIN, 0);
    is_open = duly_is(open, "true");
    snprintf(answer, size, "{\"open\":%s}", is_open ? "true" : "false");
    return DULY_DONE;
}

static int query(duly *it, void *context, const duly_command *command, char *answer, size_t size) {
    (void)it, (void)context, (void)command;
    snprintf(answer, size, "{\"open\":%s}", is_open ? "true" : "false");
    return DULY_DONE;
}

/* Say what became of the connection, each time that it changes. */
static void report(enum duly_state state) {
    static enum duly_state before = DULY_OFFLINE;
    static uint8_t refused;
    if (device.refused && device.refused != refused)
        ESP_LOGE(TAG, "the broker refuses %s (code %u): are name and token those of 'duly add device'?", device.name,
                 (unsigned)device.refused);
    if (state == DULY_ONLINE && before != DULY_ONLINE) ESP_LOGI(TAG, "online");
    if (state == DULY_OFFLINE && before == DULY_ONLINE) ESP_LOGW(TAG, "the connection was lost; trying again");
    refused = device.refused;
    before = state;
}

void app_main(void) {
    gpio_set_direction(CONFIG_LOCK_PIN, GPIO_MODE_OUTPUT);
    if (!esp_port_begin(&esp, CONFIG_LOCK_BROKER, CONFIG_LOCK_PORT) ||
        !duly_begin(&device, &esp.port, CONFIG_LOCK_NAME, CONFIG_LOCK_TOKEN)) {
        ESP_LOGE(TAG, "the partition 'duly' is missing, too small or broken");
        return;
    }
    if (CONFIG_LOCK_KEY[0] && !duly_sign_with(&device, CONFIG_LOCK_KEY)) {
        ESP_LOGE(TAG, "the key is none; 'duly add device NAME --key shared' prints one");
        return;
    }
    device.version = "1.0";
    duly_on(&device, "lock_control", DULY_AT_MOST_ONCE, lock_control, NULL);
    duly_on(&device, "query", DULY_AT_LEAST_ONCE, query, NULL);
    wifi_begin(CONFIG_LOCK_WIFI_NAME, CONFIG_LOCK_WIFI_PASSWORD, CONFIG_LOCK_TIME_SERVER);
    ESP_LOGI(TAG, "%u bytes of RAM, %u with buffers", (unsigned)DULY_RAM, (unsigned)sizeof device);
    for (;;) {
        report(duly_poll(&device));
        esp_port_wait(&esp, device.held_until ? 20 : 100);
    }
}
