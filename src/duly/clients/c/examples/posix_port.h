/* A port for Linux and macOS: a TCP connection, and a file in place of flash. */

#ifndef DULY_POSIX_PORT_H
#define DULY_POSIX_PORT_H

#include "../duly.h"

typedef struct posix_port {
    duly_port port; /* to hand to duly_begin */
    const char *host, *service;
    int socket, flash;
    char problem[96]; /* why the last connection could not be made; empty: it was made */
} posix_port;

/* False if the file cannot be opened or made. */
bool posix_port_begin(posix_port *posix, const char *host, const char *service, const char *flash_path);

/* Wait until something has come from the broker, or so many milliseconds have passed. */
void posix_port_wait(const posix_port *posix, int milliseconds);

#endif
