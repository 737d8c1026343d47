#pragma once
#include <stdint.h>
typedef int esp_err_t;
#define ESP_OK 0
#define ESP_ERROR_CHECK(x) do { esp_err_t checked = (x); (void)checked; } while (0)
