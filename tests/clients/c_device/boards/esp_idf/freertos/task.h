#pragma once
#include "FreeRTOS.h"
void vTaskDelay(TickType_t ticks);
