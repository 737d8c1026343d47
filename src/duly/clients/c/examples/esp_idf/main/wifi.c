#include "wifi.h"

#include <string.h>

#include "esp_err.h"
#include "esp_event.h"
#include "esp_log.h"
#include "esp_netif.h"
#include "esp_netif_sntp.h"
#include "esp_wifi.h"
#include "nvs_flash.h"

static const char *TAG = "wifi";

static void on_wifi(void *context, esp_event_base_t base, int32_t id, void *data) {
    (void)context, (void)base, (void)data;
    if (id == WIFI_EVENT_STA_DISCONNECTED) ESP_LOGW(TAG, "no network; trying again");
    if (id == WIFI_EVENT_STA_START || id == WIFI_EVENT_STA_DISCONNECTED) esp_wifi_connect();
}

/* A name of full length has no zero at its end. */
static void fill(uint8_t *field, size_t room, const char *text) {
    size_t size = strlen(text);
    memcpy(field, text, size < room ? size : room);
}

void wifi_begin(const char *name, const char *password, const char *time_server) {
    wifi_init_config_t start = WIFI_INIT_CONFIG_DEFAULT();
    wifi_config_t network;
    esp_err_t stored = nvs_flash_init();
    if (stored == ESP_ERR_NVS_NO_FREE_PAGES || stored == ESP_ERR_NVS_NEW_VERSION_FOUND) {
        ESP_ERROR_CHECK(nvs_flash_erase()); /* settings of the radio; what duly remembers is elsewhere */
        stored = nvs_flash_init();
    }
    ESP_ERROR_CHECK(stored);
    ESP_ERROR_CHECK(esp_netif_init());
    ESP_ERROR_CHECK(esp_event_loop_create_default());
    esp_netif_create_default_wifi_sta();
    ESP_ERROR_CHECK(esp_wifi_init(&start));
    ESP_ERROR_CHECK(esp_event_handler_register(WIFI_EVENT, ESP_EVENT_ANY_ID, on_wifi, NULL));
    memset(&network, 0, sizeof network);
    fill(network.sta.ssid, sizeof network.sta.ssid, name);
    fill(network.sta.password, sizeof network.sta.password, password);
    ESP_ERROR_CHECK(esp_wifi_set_mode(WIFI_MODE_STA));
    ESP_ERROR_CHECK(esp_wifi_set_config(WIFI_IF_STA, &network));
    ESP_ERROR_CHECK(esp_wifi_start());
    esp_sntp_config_t time = ESP_NETIF_SNTP_DEFAULT_CONFIG(time_server);
    ESP_ERROR_CHECK(esp_netif_sntp_init(&time));
}
