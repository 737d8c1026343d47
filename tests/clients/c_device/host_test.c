/* Tests of duly.c on the host: flash that dies at every write, a window that forgets, a broker that sends nonsense.
 *
 *     host_test power         cut the power at every write and in the middle of each, and count effects
 *     host_test window        forget ids, and accept none of them again
 *     host_test clock         a clock that is not set, and flash that cannot be read
 *     host_test cut-off       messages that are not whole
 *     host_test interrupted   what a power cut has interrupted, when its time is over
 *     host_test connection    cuts while a handler works, and refusals
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
static uint64_t wall_ms = 1700000000000u; /* the time at the start; less: a clock that was not set */
static bool cut_off, nested;

static uint32_t next_random(void) {
    noise ^= noise << 13;
    noise ^= noise >> 17;
    noise ^= noise << 5;
    return noise;
}

/* ── the board ── */

static bool port_open(void *context) {
    (void)context;
    return !cut_off;
}

static void port_close(void *context) {
    (void)context;
    to_size = to_read = 0;
}

static int port_read(void *context, uint8_t *bytes, size_t size) {
    size_t left = to_size - to_read, part = left < size ? left : size;
    (void)context;
    if (cut_off) return -1;
    memcpy(bytes, to_device + to_read, part);
    to_read += part;
    return (int)part;
}

static bool port_send(void *context, const uint8_t *bytes, size_t size) {
    (void)context;
    if (cut_off) return false;
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
    return wall_ms ? wall_ms + now_ms : 0;
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

static void feed_message(const char *message) {
    char topic[] = "nodes/lock/pending";
    uint8_t body[1024];
    size_t size = 0, length = strlen(message);
    body[size++] = 0;
    body[size++] = sizeof topic - 1;
    memcpy(body + size, topic, sizeof topic - 1);
    size += sizeof topic - 1;
    body[size++] = 0;
    body[size++] = 7;
    memcpy(body + size, message, length);
    feed(0x32, body, size + length);
}

/* A command that was minted at a time and expires at another, in seconds; 0: it does not say when. */
static void feed_dated(const char *sender, uint64_t ms, unsigned i, const char *action, uint64_t exp) {
    char message[512];
    snprintf(message, sizeof message,
             "{\"sender\":\"hub\",\"receiver\":\"lock\",\"msg_id\":\"%s:%llu_%u:AAAAAAAAAAAAAAAAAAAAAAAA\","
             "\"action\":\"%s\",\"exp\":%llu,\"payload\":{\"i\":%u}}",
             sender, (unsigned long long)ms, i, action, (unsigned long long)exp, i);
    feed_message(message);
}

static void feed_command(const char *sender, unsigned i, const char *action) {
    feed_dated(sender, 1700000000000u, i, action, 0);
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
    if (said_i.size >= sizeof digits) return DULY_BAD_PARAMETERS;
    memcpy(digits, said_i.at, said_i.size);
    unsigned i = (unsigned)strtoul(digits, NULL, 10);
    if (i >= COMMANDS) return DULY_BAD_PARAMETERS;
    (context ? repeats : effects)[i]++;
    if (nested) { /* the network goes while it works, and it waits for it */
        cut_off = true;
        duly_working(d, NULL);
        cut_off = false;
        now_ms += 60000;
        duly_poll(d);
    }
    snprintf(answer, size, "{\"did\":%u,\"more\":\"0123456789012345678901234567890123456789\"}", i);
    return DULY_DONE;
}

static int begin_work(duly *d, void *context, const duly_command *command, char *answer, size_t size) {
    (void)d, (void)context, (void)command, (void)answer, (void)size;
    return DULY_LATER;
}

static void start(void) {
    const uint8_t connack[2] = {0, 0};
    to_size = to_read = 0;
    CHECK(duly_begin(&device, &port, "lock", "token"));
    CHECK(duly_on(&device, "once", DULY_AT_MOST_ONCE, work, NULL));
    CHECK(duly_on(&device, "again", DULY_AT_LEAST_ONCE, work, &device));
    CHECK(duly_on(&device, "slow", DULY_AT_MOST_ONCE, begin_work, NULL));
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

/* ── clocks ── */

static void dated(uint64_t ms, unsigned i, uint64_t exp) {
    said_size = 0;
    feed_dated("phone", ms, i, "once", exp);
    CHECK(duly_poll(&device) == DULY_ONLINE);
}

static void test_clock(void) {
    const uint64_t now = 1700000000000u, unset[] = {0, 5000, 946684800000u};
    for (unsigned k = 0; k < 3; k++) { /* what may be late is not begun, and its sender is told */
        memset(flash, 0xFF, sizeof flash);
        memset(effects, 0, sizeof effects);
        wall_ms = unset[k];
        start();
        dated(now, 1, now / 1000 + 60);
        CHECK(!effects[1] && count("\"code\":1") == 1);
        dated(now, 2, 0);
        CHECK(effects[2] == 1);
        CHECK(!duly_push(&device, "event_report", NULL));
        wall_ms = now;
        dated(now, 1, now / 1000 + 60);
        CHECK(effects[1] == 1 && count("\"value\"") == 1);
        dated(now, 3, now / 1000 - 60);
        CHECK(!effects[3] && count("expired") == 1);
        dated(now, 4, UINT64_MAX / 100);
        CHECK(effects[4] == 1);
    }
    memset(flash, 0x55, sizeof flash); /* something was there, and it cannot be read */
    memset(effects, 0, sizeof effects);
    wall_ms = 0;
    for (unsigned k = 0; k < 3; k++) {
        start();
        dated(now, 5, 0);
        CHECK(!effects[5] && !count("\"msg_id\""));
    }
    wall_ms = now;
    for (unsigned k = 0; k < 2; k++) {
        dated(now - 1000, 5, 0);
        CHECK(!effects[5]);
        dated(now + now_ms + 1000, 6, 0);
        CHECK(effects[6] == 1);
        start();
    }
    said_size = 0;
    feed_message("{\"sender\":\"hub\",\"msg_id\":\"phone:1800000000000_7:AAAAAAAAAAAAAAAAAAAAAAAA\",\"action\":\"once\","
                 "\"enc\":\"base64\",\"payload\":\"e30!\"}");
    duly_poll(&device);
    CHECK(!effects[0] && count("\"code\":2") == 1); /* not run with no data */
    said_size = 0;
    feed_message("{\"sender\":\"hub\",\"msg_id\":\"phone:1800000000000_8:AAAAAAAAAAAAAAAAAAAAAAAA\",\"action\":\"once\","
                 "\"exp\":\"soon\",\"payload\":{\"i\":0}}");
    duly_poll(&device);
    CHECK(!effects[0] && count("\"code\":2") == 1); /* until when it may be begun cannot be read */
    printf("what may be late is not begun\n");
}

/* A message that is cut off at any byte, or spoilt between two fields, is not run. */
static void test_cut_off(void) {
    const char whole[] = "{\"sender\":\"hub\",\"msg_id\":\"phone:1800000000000_9:AAAAAAAAAAAAAAAAAAAAAAAA\","
                         "\"action\":\"once\",\"exp\":0,\"payload\":{\"i\":9}}";
    memset(flash, 0xFF, sizeof flash);
    start();
    said_size = 0;
    for (size_t size = 0; size < sizeof whole - 1; size++) {
        char part[sizeof whole] = "";
        memcpy(part, whole, size);
        feed_message(part);
        CHECK(duly_poll(&device) == DULY_ONLINE && !effects[9] && !effects[0] && !count("\"msg_id\""));
    }
    for (size_t at = 0; whole[at]; at++) {
        char spoilt[sizeof whole];
        if (whole[at] != ',' && whole[at] != ':' && whole[at] != '}') continue;
        memcpy(spoilt, whole, sizeof whole);
        spoilt[at] = ';';
        if (strstr(spoilt, ";1800") || strstr(spoilt, ";AAAA") || strstr(spoilt, "\"i\";")) continue; /* inside a value */
        feed_message(spoilt);
        CHECK(duly_poll(&device) == DULY_ONLINE && !effects[9] && !effects[0]);
    }
    feed_message(whole);
    duly_poll(&device);
    CHECK(effects[9] == 1 && count(answer_of(9)) == 1);
    printf("what is cut off is not run\n");
}

/* What a power cut has interrupted may have happened: it is called neither late nor refused. */
static void test_interrupted(void) {
    const uint64_t now = 1700000000000u, exp = now / 1000 + 60, clocks[] = {0, 1700000120000u};
    memset(flash, 0xFF, sizeof flash);
    start();
    feed_dated("phone", now, 8, "again", exp);
    if (!setjmp(power_cut)) {
        cut_at = writes + 1; /* it is noted, it is done, and its answer is not written */
        cut_part = 0;
        duly_poll(&device);
        CHECK(false);
    }
    cut_at = -1;
    CHECK(repeats[8] == 1);
    for (unsigned k = 0; k < 2; k++) {
        wall_ms = clocks[k];
        start();
        said_size = 0;
        feed_dated("phone", now, 8, "again", exp);
        duly_poll(&device);
        CHECK(repeats[8] == 1 && !count("\"msg_id\""));
    }
    wall_ms = now;
    start();
    said_size = 0;
    feed_dated("phone", now, 8, "again", exp);
    duly_poll(&device);
    CHECK(repeats[8] == 2 && count("\"value\"") == 1);
    printf("what was interrupted is not called late\n");
}

/* ── connections ── */

static void reconnect(void) {
    const uint8_t connack[2] = {0, 0}, suback[5] = {0, 1, 1, 1, 1};
    now_ms += 60000;
    duly_poll(&device);
    feed(0x20, connack, 2);
    feed(0x90, suback, 5);
    CHECK(duly_poll(&device) == DULY_ONLINE);
}

static void test_connection(void) {
    const uint8_t denied[5] = {0, 1, 1, 0x80, 1}, connack[2] = {0, 0};
    memset(flash, 0xFF, sizeof flash);
    start();
    feed_dated("phone", 1700000000000u, 1, "slow", 0);
    CHECK(duly_poll(&device) == DULY_ONLINE && device.at_work);
    cut_off = true;
    CHECK(duly_poll(&device) == DULY_OFFLINE);
    cut_off = false;
    reconnect(); /* while it works */
    CHECK(duly_working(&device, "50"));
    said_size = 0;
    feed_dated("phone", 1700000000000u, 1, "slow", 0);
    feed_command("phone", 2, "once");
    CHECK(duly_poll(&device) == DULY_ONLINE && !effects[2] && !said_size);
    CHECK(duly_finish(&device, DULY_DONE, "{\"did\":1,\"at\":\"last\"}") && count("\"at\":\"last\"") == 1);
    duly_poll(&device);
    CHECK(effects[2] == 1 && count("\"at\":\"last\"") == 2);

    nested = true;
    feed_command("phone", 3, "once");
    feed_command("phone", 4, "once");
    duly_poll(&device);
    CHECK(effects[3] == 1 && !effects[4] && device.state == DULY_OFFLINE);
    nested = false;
    reconnect();
    command("phone", 3, "once");
    CHECK(effects[3] == 1 && count(answer_of(3)) == 1);

    uint64_t waited[3];
    for (unsigned k = 0; k < 3; k++) { /* the broker does not let it subscribe: it waits longer each time */
        cut_off = true;
        duly_poll(&device);
        cut_off = false;
        now_ms += 60000;
        duly_poll(&device);
        feed(0x20, connack, 2);
        feed(0x90, denied, 5);
        CHECK(duly_poll(&device) == DULY_OFFLINE && device.refused == 0x80);
        waited[k] = device.next_try - now_ms;
    }
    CHECK(waited[2] > waited[0]);
    for (size_t size = DULY_SEND / 4; size < DULY_SEND; size++) { /* a name that fits into no packet */
        static char name[DULY_SEND];
        memset(name, 'x', size);
        memset(flash, 0xFF, sizeof flash);
        CHECK(duly_begin(&device, &port, name, "token"));
        duly_poll(&device);
    }
    CHECK(device.state == DULY_OFFLINE);
    printf("a handler at work goes on over a cut\n");
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
    else if (words == 2 && !strcmp(word[1], "clock")) test_clock();
    else if (words == 2 && !strcmp(word[1], "cut-off")) test_cut_off();
    else if (words == 2 && !strcmp(word[1], "interrupted")) test_interrupted();
    else if (words == 2 && !strcmp(word[1], "connection")) test_connection();
    else if (words == 4 && !strcmp(word[1], "fuzz"))
        test_fuzz((uint32_t)strtoul(word[2], NULL, 10), (unsigned)strtoul(word[3], NULL, 10));
    else return 2;
    return 0;
}
