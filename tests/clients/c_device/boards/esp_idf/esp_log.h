#pragma once
__attribute__((format(printf, 2, 3))) void esp_log_stub(const char *tag, const char *format, ...);
#define ESP_LOGI(tag, ...) esp_log_stub(tag, __VA_ARGS__)
#define ESP_LOGW(tag, ...) esp_log_stub(tag, __VA_ARGS__)
#define ESP_LOGE(tag, ...) esp_log_stub(tag, __VA_ARGS__)
