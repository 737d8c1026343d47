#pragma once
#include <stdint.h>
#include "esp_err.h"
#include "esp_event.h"
#include "esp_netif.h"
extern esp_event_base_t const WIFI_EVENT;
typedef enum { WIFI_EVENT_STA_START = 2, WIFI_EVENT_STA_DISCONNECTED = 5 } wifi_event_t;
typedef enum { WIFI_MODE_NULL = 0, WIFI_MODE_STA } wifi_mode_t;
typedef enum { WIFI_IF_STA = 0, WIFI_IF_AP } wifi_interface_t;
typedef struct { int magic; } wifi_init_config_t;
#define WIFI_INIT_CONFIG_DEFAULT() {.magic = 0x1F2F3F4F}
typedef struct {
    uint8_t ssid[32];
    uint8_t password[64];
} wifi_sta_config_t;
typedef union {
    wifi_sta_config_t sta;
} wifi_config_t;
esp_netif_t *esp_netif_create_default_wifi_sta(void);
esp_err_t esp_wifi_init(const wifi_init_config_t *config);
esp_err_t esp_wifi_set_mode(wifi_mode_t mode);
esp_err_t esp_wifi_set_config(wifi_interface_t interface, wifi_config_t *config);
esp_err_t esp_wifi_start(void);
esp_err_t esp_wifi_connect(void);
