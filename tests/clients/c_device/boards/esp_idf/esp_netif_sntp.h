#pragma once
#include <stdbool.h>
#include "esp_err.h"
typedef struct {
    bool smooth_sync;
    bool start;
    const char *servers[1];
} esp_sntp_config_t;
#define ESP_NETIF_SNTP_DEFAULT_CONFIG(server) {.smooth_sync = false, .start = true, .servers = {server}}
esp_err_t esp_netif_sntp_init(const esp_sntp_config_t *config);
