#include "esp_port.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>

#include "esp_log.h"
#include "esp_random.h"
#include "esp_timer.h"
#include "freertos/FreeRTOS.h"
#include "freertos/task.h"
#include "lwip/netdb.h"
#include "lwip/sockets.h"

enum { AREAS = 2, SEND_MS = 5000, YEAR_2024 = 1704067200 };

static const char *TAG = "duly";

static uint64_t uptime_ms(void *context) {
    (void)context;
    return (uint64_t)esp_timer_get_time() / 1000u;
}

/* The clock is set by NTP; before that it counts from 1970. */
static uint64_t time_ms(void *context) {
    struct timeval now;
    (void)context;
    gettimeofday(&now, NULL);
    if (now.tv_sec < YEAR_2024) return 0;
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_usec / 1000u;
}

static uint32_t random_bits(void *context) {
    (void)context;
    return esp_random();
}

static void close_socket(void *context) {
    esp_port *esp = context;
    if (esp->socket >= 0) close(esp->socket);
    esp->socket = -1;
}

static bool open_socket(void *context) {
    esp_port *esp = context;
    struct addrinfo hints, *found = NULL;
    char service[6];
    int on = 1;
    memset(&hints, 0, sizeof hints);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%u", (unsigned)esp->number);
    if (getaddrinfo(esp->host, service, &hints, &found) || !found) {
        ESP_LOGW(TAG, "%s has no address; trying again", esp->host);
        return false;
    }
    esp->socket = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
    bool up = esp->socket >= 0 && !connect(esp->socket, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    if (!up) {
        ESP_LOGW(TAG, "cannot reach %s:%u: %s; trying again", esp->host, (unsigned)esp->number, strerror(errno));
        close_socket(context);
        return false;
    }
    setsockopt(esp->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* else an answer waits 40 ms */
    fcntl(esp->socket, F_SETFL, fcntl(esp->socket, F_GETFL, 0) | O_NONBLOCK);
    return true;
}

static int read_socket(void *context, uint8_t *bytes, size_t size) {
    esp_port *esp = context;
    if (!size) return 0;
    int came = (int)recv(esp->socket, bytes, size, 0);
    if (came > 0) return came;
    return came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
}

static bool send_socket(void *context, const uint8_t *bytes, size_t size) {
    esp_port *esp = context;
    uint64_t until = uptime_ms(context) + SEND_MS;
    while (size) {
        int sent = (int)send(esp->socket, bytes, size, 0);
        if (sent > 0) {
            bytes += sent;
            size -= (size_t)sent;
        } else if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            return false;
        } else {
            if (uptime_ms(context) > until) return false;
            vTaskDelay(pdMS_TO_TICKS(10));
        }
    }
    return true;
}

static bool flash_read(void *context, uint32_t at, void *bytes, size_t size) {
    return esp_partition_read(((esp_port *)context)->flash, at, bytes, size) == ESP_OK;
}

static bool flash_write(void *context, uint32_t at, const void *bytes, size_t size) {
    return esp_partition_write(((esp_port *)context)->flash, at, bytes, size) == ESP_OK;
}

static bool flash_erase(void *context, uint32_t area) {
    esp_port *esp = context;
    return esp_partition_erase_range(esp->flash, area * esp->port.area_size, esp->port.area_size) == ESP_OK;
}

bool esp_port_begin(esp_port *esp, const char *host, uint16_t number) {
    static const duly_port port = {
        NULL, open_socket, read_socket, send_socket, close_socket, uptime_ms, time_ms,
        random_bits, flash_read, flash_write, flash_erase, AREAS, 0,
    };
    memset(esp, 0, sizeof *esp);
    esp->port = port;
    esp->port.context = esp;
    esp->host = host;
    esp->number = number;
    esp->socket = -1;
    esp->flash = esp_partition_find_first(ESP_PARTITION_TYPE_DATA, ESP_PARTITION_SUBTYPE_ANY, "duly");
    if (!esp->flash) return false;
    esp->port.area_size = esp->flash->size / AREAS / esp->flash->erase_size * esp->flash->erase_size;
    return esp->port.area_size >= DULY_AREA_MIN;
}

void esp_port_wait(const esp_port *esp, int milliseconds) {
    struct timeval most = {milliseconds / 1000, milliseconds % 1000 * 1000};
    fd_set news;
    if (esp->socket < 0) {
        vTaskDelay(pdMS_TO_TICKS(milliseconds));
        return;
    }
    FD_ZERO(&news);
    FD_SET(esp->socket, &news);
    select(esp->socket + 1, &news, NULL, NULL, &most);
}
