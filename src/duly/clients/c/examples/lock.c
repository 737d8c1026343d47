/* A simulated lock: each effect is a line in a file, on the disk before it is answered.
 *
 *     lock 127.0.0.1 1883 lock-1 TOKEN lock.flash lock.effects [KEY]
 *
 * `lock_control` turns at once; `slow_turn` works for a second and tells how far it is; `query` says how the lock
 * stands. At the start it pushes an `event_report`. With a KEY ('duly add device lock-1 --key shared' prints it) it signs
 * what it says. Without a broker it says why, and goes on trying. */

#define _DEFAULT_SOURCE

#include "posix_port.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct lock {
    int effects;
    bool open;
    uint64_t slow_until, slow_tell; /* 0: no slow turn is at work */
} lock;

static bool write_effect(lock *it, const duly_command *command) {
    char line[512];
    int size = snprintf(line, sizeof line, "%.*s %.*s %.*s\n", (int)command->sender.size, command->sender.at,
                        (int)command->id.size, command->id.at, (int)command->data.size, command->data.at);
    return size > 0 && size < (int)sizeof line && write(it->effects, line, (size_t)size) == size &&
           !fsync(it->effects);
}

static int turn(duly *device, void *context, const duly_command *command, char *answer, size_t size) {
    lock *it = context;
    duly_text open = duly_field(command->data, "open");
    (void)device;
    if (!duly_is(open, "true") && !duly_is(open, "false")) return DULY_BAD_PARAMETERS;
    it->open = duly_is(open, "true");
    if (!write_effect(it, command)) return DULY_HARDWARE_FAULT;
    snprintf(answer, size, "{\"open\":%s}", it->open ? "true" : "false");
    return DULY_DONE;
}

static int slow_turn(duly *device, void *context, const duly_command *command, char *answer, size_t size) {
    lock *it = context;
    (void)answer, (void)size;
    if (!write_effect(it, command)) return DULY_HARDWARE_FAULT;
    it->slow_tell = device->port->uptime_ms(device->port->context);
    it->slow_until = it->slow_tell + 1000;
    return DULY_LATER;
}

static int query(duly *device, void *context, const duly_command *command, char *answer, size_t size) {
    lock *it = context;
    (void)device;
    if (duly_is(duly_field(command->data, "word"), "true")) snprintf(answer, size, it->open ? "\"open\"" : "\"shut\"");
    else snprintf(answer, size, "{\"open\":%s}", it->open ? "true" : "false");
    return DULY_DONE;
}

static void go_on(duly *device, lock *it) {
    uint64_t now = device->port->uptime_ms(device->port->context);
    if (!it->slow_until) return;
    if (now >= it->slow_until) {
        it->slow_until = 0;
        duly_finish(device, DULY_DONE, "{\"slow\":true}");
    } else if (now >= it->slow_tell) {
        it->slow_tell = now + 300;
        duly_working(device, "{\"turning\":true}");
    }
}

/* Say what became of the connection, each time that it is something else. */
static void report(const duly *device, posix_port *posix, enum duly_state state) {
    static char last[256];
    char now[256] = "lock: online";
    if (state == DULY_CONNECTING) return;
    if (state == DULY_OFFLINE && device->refused)
        snprintf(now, sizeof now, "lock: the broker refuses %s (code %u): are name and token those of 'duly add device'?",
                 device->name, device->refused);
    else if (state == DULY_OFFLINE && posix->problem[0])
        snprintf(now, sizeof now, "lock: cannot reach %s:%s: %s; trying again", posix->host, posix->service,
                 posix->problem);
    else if (state == DULY_OFFLINE) snprintf(now, sizeof now, "lock: the connection was lost; trying again");
    if (strcmp(now, last)) fprintf(stderr, "%s\n", now);
    memcpy(last, now, sizeof last);
}

int main(int count, char **words) {
    static duly device;
    static posix_port posix;
    static lock it;
    if (count == 2 && !strcmp(words[1], "ram")) {
        printf("%zu bytes of RAM, %zu with buffers\n", (size_t)DULY_RAM, sizeof device);
        return 0;
    }
    if (count != 7 && count != 8) {
        fprintf(stderr, "lock HOST PORT NAME TOKEN FLASH_FILE EFFECTS_FILE [KEY]\n");
        return 2;
    }
    it.effects = open(words[6], O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (it.effects < 0 || !posix_port_begin(&posix, words[1], words[2], words[5]) ||
        !duly_begin(&device, &posix.port, words[3], words[4])) {
        fprintf(stderr, "lock: the files cannot be used\n");
        return 1;
    }
    if (count == 8 && !duly_sign_with(&device, words[7])) {
        fprintf(stderr, "lock: the key is none; 'duly add device %s --key shared' prints one\n", words[3]);
        return 2;
    }
    device.version = "1.0";
    duly_on(&device, "lock_control", DULY_AT_MOST_ONCE, turn, &it);
    duly_on(&device, "slow_turn", DULY_AT_MOST_ONCE, slow_turn, &it);
    duly_on(&device, "query", DULY_AT_LEAST_ONCE, query, &it);
    fprintf(stderr, "lock: %zu bytes of RAM, %zu with buffers\n", (size_t)DULY_RAM, sizeof device);
    duly_push(&device, "event_report", "{\"what\":\"started\"}");
    for (;;) {
        report(&device, &posix, duly_poll(&device));
        go_on(&device, &it);
        if (it.slow_until) usleep(20000); /* while it works, nothing is read */
        else posix_port_wait(&posix, device.held_until ? 20 : 100);
    }
}
