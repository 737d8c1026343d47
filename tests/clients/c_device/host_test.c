/* Tests of duly.c on the host: flash that dies at every write, a window that forgets, a broker that sends nonsense.
 *
 *     host_test power         cut the power at every write and in the middle of each, and count effects
 *     host_test window        forget ids, and accept none of them again
 *     host_test fuzz SEED N   N connections to a broker that sends random packets */

#include "duly.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: %s (write %ld, part %ld)\n", __FILE__, __LINE__, #what, cut_at, cut_part); \
            exit(1); \
        } \
    } while (0)

enum { AREAS = 2, AREA_SIZE = 16384, COMMANDS = 400 };

static uint8_t flash[AREAS * AREA_SIZE];
static long writes, cut_at = -1, cut_part;
static jmp_buf power_cut;
static uint64_t now_ms = 1000;
static uint8_t to_device[1 << 16];
static size_t to_size, to_read;
static char said[1 << 16];
static size_t said_size;
static unsigned effects[COMMANDS], repeats[COMMANDS];
static uint32_t noise = 1;

static uint32_t next_random(void) {
    noise ^= noise << 13;
    noise ^= noise >> 17;
    noise ^= noise << 5;
    return noise;
}

/* ── the board ── */

static bool port_open(void *context) {
    (void)context;
    return true;
}

static void port_close(void *context) {
    (void)context;
    to_size = to_read = 0;
}

static int port_read(void *context, uint8_t *bytes, size_t size) {
    size_t left = to_size - to_read, part = left < size ? left : size;
    (void)context;
    memcpy(bytes, to_device + to_read, part);
    to_read += part;
    return (int)part;
}

static bool port_send(void *context, const uint8_t *bytes, size_t size) {
    (void)context;
    if (said_size + size < sizeof said) {
        memcpy(said + said_size, bytes, size);
        said_size += size;
    }
    return true;
}

static uint64_t port_uptime(void *context) {
    (void)context;
    return now_ms;
}

static uint64_t port_time(void *context) {
    (void)context;
    return 1700000000000u + now_ms;
}

static uint32_t port_random(void *context) {
    (void)context;
    return next_random();
}

static bool flash_read(void *context, uint32_t at, void *bytes, size_t size) {
    (void)context;
    if (at + size > sizeof flash) return false;
    memcpy(bytes, flash + at, size);
    return true;
}

/* A byte is written once between two erasures; the power may go in the middle. */
static bool flash_write(void *context, uint32_t at, const void *bytes, size_t size) {
    const uint8_t *from = bytes;
    bool cut = writes++ == cut_at;
    size_t part = cut ? size * (size_t)cut_part / 4 : size;
    (void)context;
    CHECK(at + size <= sizeof flash);
    for (size_t i = 0; i < size; i++) CHECK(flash[at + i] == 0xFF);
    memcpy(flash + at, from, part);
    if (cut) longjmp(power_cut, 1);
    return true;
}

static bool flash_erase(void *context, uint32_t area) {
    bool cut = writes++ == cut_at;
    (void)context;
    memset(flash + area * AREA_SIZE, 0xFF, cut ? AREA_SIZE * (size_t)cut_part / 4 : AREA_SIZE);
    if (cut) longjmp(power_cut, 1);
    return true;
}

static const duly_port port = {
    NULL, port_open, port_read, port_send, port_close, port_uptime, port_time, port_random,
    flash_read, flash_write, flash_erase, AREAS, AREA_SIZE,
};

/* ── the broker ── */

static void feed(uint8_t type, const uint8_t *body, size_t size) {
    if (to_read == to_size) to_read = to_size = 0;
    to_device[to_size++] = type;
    size_t length = size;
    do {
        uint8_t digit = length & 127;
        length >>= 7;
        to_device[to_size++] = (uint8_t)(digit | (length ? 128 : 0));
    } while (length);
    memcpy(to_device + to_size, body, size);
    to_size += size;
}

static void feed_command(const char *sender, unsigned i, const char *action) {
    char message[512], topic[] = "nodes/lock/pending";
    uint8_t body[1024];
    size_t size = 0;
    int length = snprintf(message, sizeof message,
                          "{\"sender\":\"hub\",\"receiver\":\"lock\",\"msg_id\":\"%s:1700000000000_%u:"
                          "AAAAAAAAAAAAAAAAAAAAAAAA\",\"action\":\"%s\",\"payload\":{\"i\":%u}}",
                          sender, i, action, i);
    body[size++] = 0;
    body[size++] = sizeof topic - 1;
    memcpy(body + size, topic, sizeof topic - 1);
    size += sizeof topic - 1;
    body[size++] = 0;
    body[size++] = 7;
    memcpy(body + size, message, (size_t)length);
    feed(0x32, body, size + (size_t)length);
}

static unsigned count(const char *needle) {
    unsigned found = 0;
    size_t length = strlen(needle);
    for (size_t i = 0; i + length <= said_size; i++) found += !memcmp(said + i, needle, length);
    return found;
}

/* ── the device ── */

static duly device;

static int work(duly *d, void *context, const duly_command *command, char *answer, size_t size) {
    duly_text said_i = duly_field(command->data, "i");
    char digits[8] = "";
    (void)d;
    if (said_i.size >= sizeof digits) return DULY_BAD_PARAMETERS;
    memcpy(digits, said_i.at, said_i.size);
    unsigned i = (unsigned)strtoul(digits, NULL, 10);
    if (i >= COMMANDS) return DULY_BAD_PARAMETERS;
    (context ? repeats : effects)[i]++;
    snprintf(answer, size, "{\"did\":%u,\"more\":\"0123456789012345678901234567890123456789\"}", i);
    return DULY_DONE;
}

static void start(void) {
    const uint8_t connack[2] = {0, 0};
    to_size = to_read = 0;
    CHECK(duly_begin(&device, &port, "lock", "token"));
    CHECK(duly_on(&device, "once", DULY_AT_MOST_ONCE, work, NULL));
    CHECK(duly_on(&device, "again", DULY_AT_LEAST_ONCE, work, &device));
    duly_poll(&device);
    feed(0x20, connack, 2);
    CHECK(duly_poll(&device) == DULY_ONLINE);
}

static void command(const char *sender, unsigned i, const char *action) {
    said_size = 0;
    feed_command(sender, i, action);
    CHECK(duly_poll(&device) == DULY_ONLINE);
}

static char needle[200];

static const char *answer_of(unsigned i) {
    snprintf(needle, sizeof needle, "\"value\":{\"did\":%u,", i);
    return needle;
}

/* ── cut the power at every write ── */

static volatile unsigned at; /* where the hub is: the command that it sends, again after a power cut */

static void some_work(void) {
    start();
    for (; at < 130; at++) {
        command("phone", at, at % 3 ? "once" : "again");
        if (at % 10 == 5) duly_push(&device, "event_report", "{\"open\":true}");
    }
}

static long run_with_cut(long cut, long part) {
    memset(flash, 0xFF, sizeof flash);
    memset(effects, 0, sizeof effects);
    memset(repeats, 0, sizeof repeats);
    writes = 0;
    at = 0;
    cut_at = cut;
    cut_part = part;
    if (setjmp(power_cut)) cut_at = -1;
    some_work();
    unsigned interrupted = 0;
    for (unsigned i = 0; i < 130; i++) {
        CHECK(effects[i] <= 1 && repeats[i] <= 2);
        CHECK(i % 3 || repeats[i] >= 1);
        interrupted += i % 3 && !effects[i];
    }
    CHECK(interrupted <= 1);
    CHECK(duly_pushes_waiting(&device) == DULY_PUSHES);
    for (unsigned i = 100; i < 130; i++) { /* a repeat is answered from flash, also after a restart */
        unsigned before = effects[i] + repeats[i];
        if (i == 115) start();
        command("phone", i, i % 3 ? "once" : "again");
        CHECK(effects[i] + repeats[i] == before);
        if (effects[i] && !interrupted && cut < 0) CHECK(count(answer_of(i)) == 1);
    }
    for (unsigned i = 0; i < 20; i++) { /* what is forgotten is neither run nor answered */
        unsigned before = effects[i] + repeats[i];
        command("phone", i, i % 3 ? "once" : "again");
        CHECK(effects[i] + repeats[i] == before && !count("\"value\""));
    }
    return writes;
}

static void test_power(void) {
    long all = run_with_cut(-1, 0);
    for (long cut = 0; cut < all; cut++)
        for (long part = 0; part <= 4; part++) run_with_cut(cut, part);
    printf("%ld power cuts: no effect was repeated, none was lost\n", all * 5);
}

/* ── forget ids ── */

static void test_window(void) {
    memset(flash, 0xFF, sizeof flash);
    start();
    for (unsigned i = 0; i < COMMANDS; i++) {
        command("phone", i, "once");
        CHECK(effects[i] == 1);
        command("phone", i, "once");
        CHECK(effects[i] == 1 && count(answer_of(i)) == 1);
    }
    for (int round = 0; round < 2; round++) {
        for (unsigned i = 0; i < COMMANDS; i++) {
            command("phone", i, "once");
            CHECK(effects[i] == 1);
        }
        start();
    }
    for (unsigned k = 0; k < 3 * DULY_SENDERS; k++) { /* more senders than have marks of their own */
        char name[16];
        snprintf(name, sizeof name, "app-%u", k);
        for (unsigned i = 0; i < 20; i++) command(name, i, "once");
    }
    for (unsigned i = 0; i < COMMANDS; i++) effects[i] = 0;
    for (unsigned k = 0; k < 3 * DULY_SENDERS; k++) {
        char name[16];
        snprintf(name, sizeof name, "app-%u", k);
        for (unsigned i = 0; i < 20; i++) command(name, i, "once");
    }
    for (unsigned i = 0; i < COMMANDS; i++) CHECK(!effects[i]);
    printf("what is forgotten is not accepted again\n");
}

/* ── nonsense ── */

static void test_fuzz(uint32_t seed, unsigned rounds) {
    noise = seed ? seed : 1;
    memset(flash, 0xFF, sizeof flash);
    start();
    for (unsigned round = 0; round < rounds; round++) {
        now_ms += next_random() % 2000;
        if (duly_poll(&device) == DULY_OFFLINE) {
            const uint8_t connack[2] = {0, 0};
            now_ms += 60000;
            duly_poll(&device);
            feed(0x20, connack, 2);
            duly_poll(&device);
        }
        if (to_size > sizeof to_device / 2) to_size = to_read = 0;
        size_t from = to_read == to_size ? 0 : to_size;
        feed_command("phone", next_random() % COMMANDS, next_random() % 2 ? "once" : "again");
        for (unsigned k = next_random() % 6; k; k--)
            to_device[from + next_random() % (to_size - from)] = (uint8_t)next_random();
        if (next_random() % 8 == 0) to_size = from + next_random() % (to_size - from);
        duly_poll(&device);
        said_size = 0;
    }
    for (unsigned i = 0; i < COMMANDS; i++) effects[i] = 0;
    printf("%u packets of nonsense were survived\n", rounds);
}

int main(int words, char **word) {
    printf("%zu bytes of RAM, %zu with buffers\n", (size_t)DULY_RAM, sizeof(duly));
    if (words == 2 && !strcmp(word[1], "power")) test_power();
    else if (words == 2 && !strcmp(word[1], "window")) test_window();
    else if (words == 4 && !strcmp(word[1], "fuzz"))
        test_fuzz((uint32_t)strtoul(word[2], NULL, 10), (unsigned)strtoul(word[3], NULL, 10));
    else return 2;
    return 0;
}
