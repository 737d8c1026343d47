/* duly for microcontrollers: a device that carries out each command once. C99, two files, no allocation.
 *
 * The laws. A command is in flash before it is run, and its answer before it is sent; no repeat, reset or power
 * cut repeats an effect. A command that a power cut interrupted is not run again and not answered (the hub ends
 * it as `unknown`), unless its handler is declared DULY_AT_LEAST_ONCE. Commands run one at a time, and those of
 * one sender and order key in its order. What is no longer remembered is no longer accepted: the last
 * DULY_IDS ids are kept, and of each sender the newest id that was forgotten. A push is kept in flash until the
 * hub has stored it.
 *
 * The board provides a `duly_port`: a connection to an MQTT broker, two clocks, random bits and some flash.
 * See docs/c.md, and examples/lock.c for a whole device. */

#ifndef DULY_H
#define DULY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ── sizes, each may be set by the compiler (-DDULY_IDS=50) ─────────────────────────────────────────────── */

#ifndef DULY_IDS
#define DULY_IDS 100 /* ids that are remembered; 24 bytes of RAM each */
#endif
#ifndef DULY_SENDERS
#define DULY_SENDERS 8 /* senders with a mark of their own; the marks of others are one */
#endif
#ifndef DULY_PUSHES
#define DULY_PUSHES 8 /* pushes that wait until the hub has them */
#endif
#ifndef DULY_HANDLERS
#define DULY_HANDLERS 8
#endif
#ifndef DULY_RECEIVE
#define DULY_RECEIVE 2048 /* bytes of the longest MQTT packet that is read; a command that is longer fails */
#endif
#ifndef DULY_SEND
#define DULY_SEND 1024 /* bytes of the longest MQTT packet that is sent */
#endif
#ifndef DULY_ANSWER
#define DULY_ANSWER 256 /* bytes of the longest answer that is kept for a repeat; of a longer one only the code */
#endif
#ifndef DULY_MSG_ID
#define DULY_MSG_ID 192 /* bytes of the longest msg_id: the app's name, the id, and a tag of 24 */
#endif
#ifndef DULY_HOLD
#define DULY_HOLD 512 /* bytes of a command that may wait for the one before it; 0: it does not wait */
#endif

#ifndef DULY_TIMELESS
#define DULY_TIMELESS 0 /* 1: the board never learns the time, so no command is refused for coming late */
#endif

#define DULY_HOLD_MS 300       /* how long a command waits for the one before it */
#define DULY_KEEP_ALIVE_S 30   /* of the MQTT connection */
#define DULY_HEARTBEAT_S 60    /* between two reports of the status */
#define DULY_PUSH_AGAIN_MS 5000

/* ── what a device answers ──────────────────────────────────────────────────────────────────────────────── */

enum duly_code {
    DULY_DONE = 0,
    DULY_BUSY = 1,
    DULY_BAD_PARAMETERS = 2,
    DULY_HARDWARE_FAULT = 3,
    DULY_TIMEOUT = 4,
    DULY_NOT_AUTHORISED = 5,
    DULY_OUT_OF_RESOURCES = 6,
    DULY_NOT_SUPPORTED = 7,
    DULY_LATER = 255 /* returned by a handler that goes on: it calls duly_finish when it is done */
};

enum duly_effect {
    DULY_AT_MOST_ONCE,  /* a power cut in the middle: the outcome is unknown, and it is not run again */
    DULY_AT_LEAST_ONCE  /* a power cut in the middle: it is run again */
};

enum duly_state { DULY_OFFLINE, DULY_CONNECTING, DULY_ONLINE };

/* ── what the board provides ────────────────────────────────────────────────────────────────────────────── */

/* Every function gets `context`. Flash is `areas` areas of `area_size` bytes, at least two; what is erased reads
 * as 0xFF, and a byte is written once between two erasures. `write` returns when the bytes are durable. */
typedef struct duly_port {
    void *context;
    bool (*open)(void *context);                                  /* connect to the broker */
    int (*read)(void *context, uint8_t *bytes, size_t size);      /* how many came; 0: none now, < 0: closed */
    bool (*send)(void *context, const uint8_t *bytes, size_t size); /* all of them, or false */
    void (*close)(void *context);
    uint64_t (*uptime_ms)(void *context); /* never jumps */
    uint64_t (*time_ms)(void *context);   /* since 1970; 0, or before 2020, while it is not known */
    uint32_t (*random)(void *context);
    bool (*flash_read)(void *context, uint32_t at, void *bytes, size_t size);
    bool (*flash_write)(void *context, uint32_t at, const void *bytes, size_t size);
    bool (*flash_erase)(void *context, uint32_t area);
    uint32_t areas;
    uint32_t area_size;
} duly_port;

/* ── commands ───────────────────────────────────────────────────────────────────────────────────────────── */

/* A piece of text in the receive buffer: valid until the handler returns. */
typedef struct duly_text {
    const char *at;
    size_t size;
} duly_text;

typedef struct duly_command {
    duly_text type;   /* lock_control */
    duly_text data;   /* JSON, or empty */
    duly_text sender; /* the app */
    duly_text id;     /* its seq_id */
    bool again;       /* it was interrupted by a reset before */
} duly_command;

struct duly;

/* Returns a code. `answer` has room for `size` bytes of JSON, ended by a zero; leave it empty for no data. */
typedef int (*duly_handler)(struct duly *device, void *context, const duly_command *command, char *answer,
                            size_t size);

/* ── the device; its fields are its own ─────────────────────────────────────────────────────────────────── */

#define DULY_KID 16 /* characters of a key's id */
#define DULY_KEY 32 /* bytes of a key */

#define DULY_ID 14 /* bytes of an id: 6 of milliseconds, 8 of the counter; the greater ones are later */

typedef struct duly_id {
    uint8_t bytes[DULY_ID];
} duly_id;

typedef struct duly_entry {
    duly_id id;
    uint16_t print;  /* hash of type and data */
    uint32_t sender; /* hash of its name */
    uint16_t lane;   /* hash of its order key; 0: no order */
    uint8_t code;    /* of the answer */
    uint8_t stage;   /* begun, or answered */
} duly_entry;

typedef struct duly_mark {
    duly_id id;
    uint32_t sender; /* 0: of every sender */
} duly_mark;

typedef struct duly_push_slot {
    duly_id id;
    uint32_t at; /* in flash; 0: free */
} duly_push_slot;

typedef struct duly {
    const duly_port *port;
    const char *name, *token, *prefix, *version;
    int battery, rssi; /* reported if not negative (battery) or not 0 (rssi) */

    struct { const char *type; duly_handler handler; void *context; enum duly_effect effect; } on[DULY_HANDLERS];
    uint8_t handlers;

    duly_entry ids[DULY_IDS]; /* in order of arrival */
    uint16_t count;
    duly_mark marks[DULY_SENDERS + 1];
    duly_push_slot pushes[DULY_PUSHES];
    duly_id minted;

    uint32_t generation, area, end; /* where the log is written */
    bool lost;                      /* flash held something unreadable: what has run is not known */

    char kid[DULY_KID + 1]; /* of the key that signs; empty: nothing is signed */
    uint8_t key[DULY_KEY];

    enum duly_state state;
    uint8_t refused; /* why the broker refused the last connection, by the code of its CONNACK, or 128: it refused the
                        subscription; 0: it did not */
    uint64_t session, next_try, last_sent, last_heard, next_status, next_push;
    uint32_t backoff;
    uint16_t packet;

    bool polling; /* duly_poll is under way */
    bool at_work; /* a handler works, or has returned DULY_LATER: its command is the last of `ids` */
    char work_msg_id[DULY_MSG_ID];
    unsigned pushes_refused; /* by the hub, for good */

    uint64_t held_until; /* 0: nothing is held */
    uint16_t held_size;
    size_t received, skip;
    uint8_t in[DULY_RECEIVE];
    uint8_t out[DULY_SEND];
#if DULY_HOLD
    uint8_t held[DULY_HOLD];
#endif
} duly;

/* RAM without the buffers, in bytes. */
#define DULY_RAM (sizeof(duly) - DULY_RECEIVE - DULY_SEND - DULY_HOLD)

/* The smallest area of flash: room for all that is remembered, and for as much again before it is rewritten. */
#define DULY_RECORD (DULY_ANSWER + 64)
#define DULY_AREA_MIN (64 + 2 * (DULY_IDS * 36 + (DULY_SENDERS + 1) * 28 + DULY_PUSHES * (DULY_RECORD + 12)))

/* Prepare a device: read what flash remembers. False if flash cannot be used. `name` and `token` are those of
 * 'duly add device'; both strings must stay. */
bool duly_begin(duly *device, const duly_port *port, const char *name, const char *token);

/* Sign everything that is sent from now on, with the key that 'duly add device NAME --key shared' printed (its id, a
 * colon, its secret in base64). False if the text is no such key. */
bool duly_sign_with(duly *device, const char *key);

/* Declare the handler of a command type; NULL stands for every other type. False if there are too many. */
bool duly_on(duly *device, const char *type, enum duly_effect effect, duly_handler handler, void *context);

/* Do what is to be done now: connect, read, run, repeat. Call it again and again; it does not block longer than
 * the port's functions and the handlers do. Returns how the connection is. A handler that takes long may call it,
 * too: it then only keeps the connection alive. */
enum duly_state duly_poll(duly *device);

/* Report that the command at work goes on: the hub sends no repeat and waits anew. `progress` is JSON. */
bool duly_working(duly *device, const char *progress);

/* End the command whose handler returned DULY_LATER. `answer` is JSON, or NULL. */
bool duly_finish(duly *device, enum duly_code code, const char *answer);

/* Keep a push until the hub has stored it, and send it. `data` is JSON. False if too many wait, if it is too
 * long, or if the time is not known yet and nothing was pushed before. */
bool duly_push(duly *device, const char *type, const char *data);

/* How many pushes wait. */
unsigned duly_pushes_waiting(const duly *device);

/* The value of a field of a JSON object, as text (a string without its quotes). Empty if there is none. */
duly_text duly_field(duly_text json, const char *name);

/* Whether a text is this word. */
bool duly_is(duly_text text, const char *word);

#ifdef __cplusplus
}
#endif
#endif
