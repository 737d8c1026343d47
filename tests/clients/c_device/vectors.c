/* Answers questions about ids, windows and prints with the functions of duly.c, one line each from stdin:
 *
 *     id TEXT                    its ms and n, or "malformed"
 *     compare TEXT TEXT          -1, 0 or 1
 *     see SENDER TEXT            fresh, duplicate or stale; a fresh one is remembered
 *     check SENDER TEXT          the same, and nothing is remembered
 *     restart                    what is in flash is read anew
 *     print TYPE JSON            the print of a command
 *     new                        a device with erased flash */

#include "duly.c"

enum { AREAS = 2, AREA_SIZE = 65536 };

static uint8_t flash[AREAS * AREA_SIZE];

static bool flash_read(void *context, uint32_t at, void *bytes, size_t size) {
    (void)context;
    memcpy(bytes, flash + at, size);
    return true;
}

static bool flash_write(void *context, uint32_t at, const void *bytes, size_t size) {
    (void)context;
    memcpy(flash + at, bytes, size);
    return true;
}

static bool flash_erase(void *context, uint32_t area) {
    (void)context;
    memset(flash + area * AREA_SIZE, 0xFF, AREA_SIZE);
    return true;
}

static uint64_t no_time(void *context) {
    (void)context;
    return 0;
}

static const duly_port port = {.uptime_ms = no_time, .time_ms = no_time, .flash_read = flash_read,
                               .flash_write = flash_write, .flash_erase = flash_erase, .areas = AREAS,
                               .area_size = AREA_SIZE};
static duly device;

static void restart(void) {
    if (!duly_begin(&device, &port, "lock", "token")) printf("broken\n");
}

static bool read_id(const char *sender, const char *text, task *t) {
    static char msg_id[400];
    int size = snprintf(msg_id, sizeof msg_id, "%s:%s:AAAAAAAAAAAAAAAAAAAAAAAA", sender, text);
    memset(t, 0, sizeof *t);
    t->msg_id.at = msg_id;
    t->msg_id.size = (size_t)size;
    return read_ids(t);
}

static void see(const char *sender, const char *text, bool keep) {
    task t;
    uint8_t body[ID_SIZE];
    if (!read_id(sender, text, &t)) printf("malformed\n");
    else if (find(&device, &t.entry)) printf("duplicate\n");
    else if (forgot(&device, &t.entry)) printf("stale\n");
    else {
        printf("fresh\n");
        t.entry.stage = BEGUN;
        write_entry(body, &t.entry);
        if (keep && append(&device, BEGUN, body, ID_SIZE)) remember(&device, &t.entry);
    }
}

int main(void) {
    static char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        task t, other;
        line[strcspn(line, "\n")] = 0;
        char *verb = line, *one = strchr(line, ' '), *two = NULL;
        if (one) *one++ = 0;
        if (one && (two = strchr(one, ' '))) *two++ = 0;
        if (!strcmp(verb, "id")) {
            if (two) *(two - 1) = ' '; /* the space was part of the id */
            if (!read_id("phone", one, &t)) printf("malformed\n");
            else printf("%llu %llu\n", (unsigned long long)ms_of(&t.entry.id), (unsigned long long)n_of(&t.entry.id));
        } else if (!strcmp(verb, "compare")) {
            read_id("phone", one, &t);
            read_id("phone", two, &other);
            int way = compare(&t.entry.id, &other.entry.id);
            printf("%d\n", (way > 0) - (way < 0));
        } else if (!strcmp(verb, "see") || !strcmp(verb, "check")) see(one, two, *verb == 's');
        else if (!strcmp(verb, "restart")) restart();
        else if (!strcmp(verb, "new")) {
            memset(flash, 0xFF, sizeof flash);
            restart();
        } else if (!strcmp(verb, "print")) {
            uint32_t print = hash(0, one, strlen(one));
            printf("%u\n", (unsigned)(uint16_t)(hash(print, two, strlen(two)) >> 8));
        } else return 1;
    }
    return 0;
}
