/* A port for ESP-IDF: a TCP connection of lwIP, and the partition "duly" as flash. */

#ifndef DULY_ESP_PORT_H
#define DULY_ESP_PORT_H

#include "duly.h"

#include "esp_partition.h"

typedef struct esp_port {
    duly_port port; /* to hand to duly_begin */
    const char *host;
    uint16_t number;
    int socket;
    const esp_partition_t *flash;
} esp_port;

/* False if there is no partition "duly", or if it is too small. */
bool esp_port_begin(esp_port *esp, const char *host, uint16_t number);

/* Wait until something has come from the broker, or so many milliseconds have passed. */
void esp_port_wait(const esp_port *esp, int milliseconds);

#endif
