/* A device that counts, by duly.c: counter HOST PORT NAME TOKEN STORE. */

#define _DEFAULT_SOURCE

#include "posix_port.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[512], new_path[520];

/* The number is replaced as a whole: a kill leaves the old one or the new one. */
static int count(duly *device, void *context, const duly_command *command, char *answer, size_t size) {
    int n = 0;
    (void)context;
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%d", &n) != 1) n = 0;
        fclose(file);
    }
    n++;
    if (!(file = fopen(new_path, "w"))) return DULY_HARDWARE_FAULT;
    fprintf(file, "%d", n);
    fflush(file);
    fsync(fileno(file));
    fclose(file);
    if (rename(new_path, path)) return DULY_HARDWARE_FAULT;
    snprintf(answer, size, "{\"count\":%d}", n);
    if (duly_is(duly_field(command->data, "push"), "true")) duly_push(device, "event_report", answer);
    return DULY_DONE;
}

int main(int words, char **word) {
    static duly device;
    static posix_port posix;
    char flash[520];
    if (words != 6) return 2;
    snprintf(path, sizeof path, "%s/count", word[5]);
    snprintf(new_path, sizeof new_path, "%s.new", path);
    snprintf(flash, sizeof flash, "%s/flash", word[5]);
    if (!posix_port_begin(&posix, word[1], word[2], flash) || !duly_begin(&device, &posix.port, word[3], word[4])) return 1;
    duly_on(&device, "count", DULY_AT_MOST_ONCE, count, NULL);
    for (;;) {
        duly_poll(&device);
        posix_port_wait(&posix, 20);
    }
}
