#pragma once
#include "esp_err.h"
typedef struct esp_netif_obj esp_netif_t;
esp_err_t esp_netif_init(void);
