/* Answers questions about ids, windows, prints, signatures and lanes with the functions of duly.c, one line each from stdin:
 *
 *     id TEXT                    its ms and n, or "malformed"
 *     compare TEXT TEXT          -1, 0 or 1
 *     see SENDER TEXT            fresh, duplicate or stale; a fresh one is remembered
 *     check SENDER TEXT          the same, and nothing is remembered
 *     restart                    what is in flash is read anew
 *     print TYPE JSON            the print of a command
 *     key KID:SECRET             sign with this key
 *     fields TAB FIELD TAB …     the signature of these fields, in hex
 *     signed KIND PREFIX SIGNER READER TAB FIELD TAB …
 *                                the signature of such a message; a field after '=' is a content, as it stands
 *     arrive MS SENDER ID KEY MODE AFTER
 *                                at this time a command comes; what is run or superseded until then is printed
 *     pass MS                    nothing comes until this time
 *     new                        a device with erased flash */

#include "duly.c"

#include <stdio.h>
#include <stdlib.h>

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

static uint64_t clock_ms;

static uint64_t uptime(void *context) {
    (void)context;
    return clock_ms;
}

/* What the device says: of its answers only that a command is superseded. */
static bool hear(void *context, const uint8_t *bytes, size_t size) {
    static char text[DULY_SEND + 1];
    (void)context;
    for (size_t i = 0; i < size; i++) text[i] = bytes[i] ? (char)bytes[i] : ' ';
    text[size] = 0;
    const char *id = strstr(text, "\"msg_id\":\"");
    if (id && strstr(text, "superseded")) printf("superseded %.*s\n", (int)strcspn(id + 10, "\""), id + 10);
    return true;
}

static const duly_port port = {.uptime_ms = uptime, .send = hear, .time_ms = no_time, .flash_read = flash_read,
                               .flash_write = flash_write, .flash_erase = flash_erase, .areas = AREAS,
                               .area_size = AREA_SIZE};
static duly device;

static int run_one(duly *d, void *context, const duly_command *command, char *answer, size_t size);

static void restart(void) {
    if (!duly_begin(&device, &port, "lock", "token")) printf("broken\n");
    duly_on(&device, "turn", DULY_AT_MOST_ONCE, run_one, NULL);
    device.state = DULY_ONLINE;
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

static int run_one(duly *d, void *context, const duly_command *command, char *answer, size_t size) {
    (void)d, (void)context, (void)answer, (void)size;
    printf("run %.*s:%.*s %llu\n", (int)command->sender.size, command->sender.at, (int)command->id.size,
           command->id.at, (unsigned long long)clock_ms);
    return DULY_DONE;
}

static void pass(uint64_t until) {
    for (; clock_ms < until; clock_ms++) release(&device);
    release(&device);
}

/* MS SENDER ID KEY MODE AFTER; a key that is empty stands as "-". */
static void arrive(char *words) {
    char sender[64], id[64], key[64], mode[16], message[512];
    unsigned long long at;
    long after;
    if (sscanf(words, "%llu %63s %63s %63s %15s %ld", &at, sender, id, key, mode, &after) != 6) exit(1);
    pass(at);
    int size = snprintf(message, sizeof message,
                        "{\"msg_id\":\"%s:%s:AAAAAAAAAAAAAAAAAAAAAAAA\",\"action\":\"turn\",\"payload\":null,"
                        "\"order\":{\"key\":\"%s\",\"mode\":\"%s\",\"after\":%ld}}",
                        sender, id, strcmp(key, "-") ? key : "", mode, after);
    duly_text text = {message, (size_t)size};
    take_or_hold(&device, text);
    release(&device);
}

/* The fields that follow, each after a tab. */
static void sign_rest(sha256 *s, char *at) {
    uint8_t digest[32];
    while (at && *at) {
        char *field = at + 1, *end = strchr(field, '\t');
        duly_text text = {field, end ? (size_t)(end - field) : strlen(field)};
        if (*field == '=') {
            text.at++;
            text.size--;
            sign_content(s, text);
        } else sign_field(s, "", text);
        at = end;
    }
    hmac_end(s, &device, digest);
    for (unsigned i = 0; i < sizeof digest; i++) printf("%02x", digest[i]);
    printf("\n");
}

static void sign_message(char *words, char *fields) {
    char kind[16], prefix[64], signer[64], reader[64];
    sha256 s;
    if (sscanf(words, "%15s %63s %63s %63s", kind, prefix, signer, reader) != 4) exit(1);
    device.prefix = prefix;
    device.name = signer;
    sign_begin(&s, &device, kind, strcmp(reader, "-") ? reader : "");
    sign_rest(&s, fields);
}

/* The verbs of signing and of order. False if it is none of them. */
static bool sign_or_order(char *line) {
    char *tab = strchr(line, '\t');
    if (tab) *tab = 0;
    if (!strncmp(line, "key ", 4)) printf("%s\n", duly_sign_with(&device, line + 4) ? "taken" : "refused");
    else if (!strncmp(line, "signed ", 7)) {
        if (tab) *tab = '\t';
        char words[256];
        snprintf(words, sizeof words, "%.*s", (int)(tab ? tab - line - 7 : 0), line + 7);
        sign_message(words, tab);
    } else if (!strcmp(line, "fields")) {
        sha256 s;
        if (tab) *tab = '\t';
        hmac_begin(&s, &device, 0x36);
        sign_rest(&s, tab);
    } else if (!strncmp(line, "arrive ", 7)) arrive(line + 7);
    else if (!strncmp(line, "pass ", 5)) pass(strtoull(line + 5, NULL, 10));
    else return false;
    return true;
}

int main(void) {
    static char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        task t, other;
        line[strcspn(line, "\n")] = 0;
        if (sign_or_order(line)) continue;
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
