/* duly for microcontrollers; see duly.h. In this order: bytes and text, signatures, flash, MQTT, answers, commands,
 * pushes. */

#include "duly.h"

#include <string.h>

enum { BEGUN = 1, ANSWERED, MARK, PUSH, PUSHED, MINTED, LOST }; /* records in flash, and stages of an id */
enum { CONNECT = 0x10, CONNACK = 0x20, PUBLISH = 0x30, PUBACK = 0x40, SUBSCRIBE = 0x82, SUBACK = 0x90,
       PINGREQ = 0xC0, PINGRESP = 0xD0 };
enum { QOS1 = 2, RETAIN = 1 };

#define MAGIC 0x31594C44u /* DLY1 */
#define AREA_HEAD 12u
#define RECORD_HEAD 4u
#define ID_SIZE (DULY_ID + 8u) /* of an entry in a record: id, print, sender, lane */
#define BACKOFF_MIN_MS 500u
#define BACKOFF_MAX_MS 30000u
#define ANSWER_WITHIN_MS 10000u
#define EARLIEST_MS 1577836800000u /* 2020: a clock that shows less was not set */

/* ── bytes and text ─────────────────────────────────────────────────────────────────────────────────────── */

/* Numbers in records stand with their lowest byte first. */
static void put(uint8_t *to, uint64_t value, unsigned bytes) {
    while (bytes--) {
        *to++ = (uint8_t)value;
        value >>= 8;
    }
}

static uint64_t get(const uint8_t *from, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | from[bytes];
    return value;
}

/* The digits of a number, at the end of `text`; where they begin. (Small C libraries print no 64 bits.) */
enum { DIGITS = 20 };

static const char *digits_of(uint64_t value, char text[DIGITS + 1]) {
    char *at = text + DIGITS;
    *at = 0;
    do *--at = (char)('0' + value % 10);
    while (value /= 10);
    return at;
}

/* The 16 hexadecimal digits of a number. */
static void hex_of(uint64_t value, char text[17]) {
    for (unsigned i = 0; i < 16; i++) text[i] = "0123456789abcdef"[value >> (60 - 4 * i) & 15];
    text[16] = 0;
}

static duly_id make_id(uint64_t ms, uint64_t n) {
    duly_id id;
    for (unsigned i = 0; i < 6; i++) id.bytes[i] = (uint8_t)(ms >> (40 - 8 * i));
    for (unsigned i = 0; i < 8; i++) id.bytes[6 + i] = (uint8_t)(n >> (56 - 8 * i));
    return id;
}

static uint64_t part_of(const duly_id *id, unsigned from, unsigned to) {
    uint64_t value = 0;
    while (from < to) value = value << 8 | id->bytes[from++];
    return value;
}

static uint64_t ms_of(const duly_id *id) { return part_of(id, 0, 6); }

static uint64_t n_of(const duly_id *id) { return part_of(id, 6, DULY_ID); }

/* Positive if the first is later, 0 if they are the same. */
static int compare(const duly_id *one, const duly_id *other) { return memcmp(one->bytes, other->bytes, DULY_ID); }

static uint32_t crc32(uint32_t crc, const uint8_t *bytes, size_t size) {
    static const uint32_t table[16] = {
        0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
        0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C, 0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C,
    };
    crc = ~crc;
    while (size--) {
        crc ^= *bytes++;
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

/* FNV-1a; never 0, which stands for none. */
static uint32_t hash(uint32_t seed, const char *at, size_t size) {
    uint32_t value = seed ^ 2166136261u;
    while (size--) value = (value ^ (uint8_t)*at++) * 16777619u;
    return value ? value : 1;
}

bool duly_is(duly_text text, const char *word) {
    return text.size == strlen(word) && !memcmp(text.at, word, text.size);
}

static bool number(duly_text text, uint64_t *value) {
    if (!text.size || text.size > 19 || (text.size > 1 && *text.at == '0')) return false;
    *value = 0;
    for (size_t i = 0; i < text.size; i++) {
        if (text.at[i] < '0' || text.at[i] > '9') return false;
        *value = *value * 10 + (uint64_t)(text.at[i] - '0');
    }
    return true;
}

/* The end of the JSON value that begins here, or NULL. */
static const char *value_end(const char *at, const char *end) {
    unsigned depth = 0;
    bool quoted = false;
    for (; at < end; at++) {
        if (quoted) {
            if (*at == '\\') at++;
            else if (*at == '"') quoted = false;
            if (!quoted && !depth) return at + 1;
        } else if (*at == '"') quoted = true;
        else if (*at == '{' || *at == '[') depth++;
        else if (*at == '}' || *at == ']') {
            if (!depth) return at;
            if (!--depth) return at + 1;
        } else if (!depth && (*at == ',' || *at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) return at;
    }
    return depth || quoted ? NULL : at;
}

static const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
    return at;
}

/* The value of a field as it stands, a string with its quotes. */
static duly_text raw_field(duly_text json, const char *name) {
    const duly_text none = {"", 0};
    const char *end = json.at + json.size, *at = skip_space(json.at, end);
    size_t length = strlen(name);
    if (at >= end || *at != '{') return none;
    for (at = skip_space(at + 1, end); at < end && *at == '"'; at = skip_space(at, end)) {
        const char *key_end = value_end(at, end), *value, *stop;
        if (!key_end || (value = skip_space(key_end, end)) >= end || *value != ':') return none;
        value = skip_space(value + 1, end);
        if (!(stop = value_end(value, end))) return none;
        if ((size_t)(key_end - at) == length + 2 && !memcmp(at + 1, name, length)) {
            duly_text found = {value, (size_t)(stop - value)};
            return found;
        }
        at = skip_space(stop, end);
        if (at >= end || *at != ',') return none;
        at++;
    }
    return none;
}

/* Whether a text is one JSON object, to its last brace: of one that was cut off, no field is believed. */
static bool is_object(duly_text json) {
    const char *end = json.at + json.size, *at = skip_space(json.at, end), *value, *stop;
    if (at >= end || *at != '{') return false;
    for (at = skip_space(at + 1, end); at < end && *at == '"'; at = skip_space(at + 1, end)) {
        if (!(stop = value_end(at, end)) || (value = skip_space(stop, end)) >= end || *value != ':') return false;
        value = skip_space(value + 1, end);
        if (!(stop = value_end(value, end)) || stop == value) return false;
        at = skip_space(stop, end);
        if (at >= end || *at != ',') break;
    }
    return at < end && *at == '}' && at[-1] != ',' && skip_space(at + 1, end) == end;
}

duly_text duly_field(duly_text json, const char *name) {
    duly_text found = raw_field(json, name);
    if (found.size >= 2 && *found.at == '"') {
        found.at++;
        found.size -= 2;
    }
    return found;
}

static int digit64(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decode base64, also into the place where it stands. False if it is none. */
static bool decode64(duly_text text, char *to, size_t *size) {
    *size = 0;
    if (text.size % 4) return false;
    for (size_t i = 0; i < text.size; i += 4) {
        uint32_t bits = 0;
        unsigned pad = 0;
        for (unsigned k = 0; k < 4; k++) {
            int digit = digit64(text.at[i + k]);
            if (text.at[i + k] == '=' && k > 1 && i + 4 == text.size) digit = 0, pad++;
            if (digit < 0) return false;
            bits = bits << 6 | (uint32_t)digit;
        }
        for (unsigned k = 0; k < 3 - pad; k++) to[(*size)++] = (char)(bits >> (16 - 8 * k));
    }
    return true;
}

/* The four characters of up to three bytes. */
static void encode64(char *to, const uint8_t *bytes, size_t size) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = (uint32_t)bytes[0] << 16 | (size > 1 ? (uint32_t)bytes[1] << 8 : 0) | (size > 2 ? bytes[2] : 0);
    for (unsigned k = 0; k < 4; k++) to[k] = k > size ? '=' : digits[bits >> (18 - 6 * k) & 63];
}

/* The content of a field: base64 is decoded where it stands, any other JSON is left as it is. */
static duly_text content(duly_text message, const char *name, bool *sound) {
    duly_text text = raw_field(message, name), none = {"", 0};
    *sound = true;
    if (duly_is(text, "null")) return none;
    if (text.size < 2 || *text.at != '"') return text;
    text.at++;
    text.size -= 2;
    if (text.size % 4 || !duly_is(duly_field(message, "enc"), "base64")) return text;
    char *to = (char *)text.at; /* the receive buffer, which is ours to write */
    size_t size;
    if (!(*sound = decode64(text, to, &size))) return none;
    text.size = size;
    return text;
}

/* ── signatures: HMAC-SHA256 over fields, each led by its length in four bytes ─────────────────────────────── */

typedef struct sha256 {
    uint32_t sums[8];
    uint64_t size;
    uint8_t block[64];
} sha256;

static uint32_t turned(uint32_t word, unsigned by) { return word >> by | word << (32 - by); }

static void sha256_block(sha256 *s) {
    static const uint32_t constants[64] = {
        0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
        0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
        0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
        0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
        0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
        0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
        0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
        0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
    };
    uint32_t words[16], now[8];
    memcpy(now, s->sums, sizeof now);
    for (unsigned i = 0; i < 64; i++) {
        uint32_t *w = &words[i & 15];
        if (i < 16) {
            const uint8_t *b = s->block + 4 * i;
            *w = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
        } else {
            uint32_t early = words[(i + 1) & 15], late = words[(i + 14) & 15];
            *w += (turned(early, 7) ^ turned(early, 18) ^ early >> 3) + words[(i + 9) & 15] +
                  (turned(late, 17) ^ turned(late, 19) ^ late >> 10);
        }
        uint32_t e = now[4], a = now[0];
        uint32_t one = now[7] + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & now[5]) ^ (~e & now[6])) +
                       constants[i] + *w;
        uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) +
                       ((a & now[1]) ^ (a & now[2]) ^ (now[1] & now[2]));
        memmove(now + 1, now, 7 * sizeof *now);
        now[4] += one;
        now[0] = one + two;
    }
    for (unsigned i = 0; i < 8; i++) s->sums[i] += now[i];
}

static void sha256_add(sha256 *s, const void *bytes, size_t size) {
    const uint8_t *at = bytes;
    while (size--) {
        s->block[s->size++ & 63] = *at++;
        if (!(s->size & 63)) sha256_block(s);
    }
}

static void sha256_end(sha256 *s, uint8_t digest[32]) {
    uint64_t bits = s->size * 8;
    sha256_add(s, "\x80", 1);
    while ((s->size & 63) != 56) sha256_add(s, "", 1);
    for (unsigned i = 0; i < 8; i++) s->block[56 + i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_block(s);
    for (unsigned i = 0; i < 32; i++) digest[i] = (uint8_t)(s->sums[i / 4] >> (24 - 8 * (i & 3)));
}

/* The beginning of a hash with the key: `pad` is 0x36 for the inner one, 0x5C for the outer. */
static void hmac_begin(sha256 *s, const duly *d, uint8_t pad) {
    static const uint32_t sums[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                     0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
    uint8_t block[64];
    memcpy(s->sums, sums, sizeof sums);
    s->size = 0;
    for (unsigned i = 0; i < sizeof block; i++) block[i] = (uint8_t)((i < DULY_KEY ? d->key[i] : 0) ^ pad);
    sha256_add(s, block, sizeof block);
}

static void hmac_end(sha256 *s, const duly *d, uint8_t digest[32]) {
    sha256_end(s, digest);
    hmac_begin(s, d, 0x5C);
    sha256_add(s, digest, 32);
    sha256_end(s, digest);
}

/* A field in two parts, either of which may be empty. */
static void sign_field(sha256 *s, const char *first, duly_text rest) {
    size_t lead = strlen(first), size = lead + rest.size;
    const uint8_t length[4] = {(uint8_t)(size >> 24), (uint8_t)(size >> 16), (uint8_t)(size >> 8), (uint8_t)size};
    sha256_add(s, length, sizeof length);
    sha256_add(s, first, lead);
    sha256_add(s, rest.at, rest.size);
}

static void sign_text(sha256 *s, const char *text) {
    const duly_text none = {"", 0};
    sign_field(s, text, none);
}

static void sign_number(sha256 *s, int64_t value) {
    char text[DIGITS + 1];
    duly_text digits = {digits_of(value < 0 ? 0 - (uint64_t)value : (uint64_t)value, text), 0};
    digits.size = strlen(digits.at);
    sign_field(s, value < 0 ? "-" : "", digits);
}

/* A content as it stands in the message: a string is base64, since the client writes no other into what it signs. */
static void sign_content(sha256 *s, duly_text raw) {
    duly_text inside = raw;
    if (!raw.size || duly_is(raw, "null")) sign_text(s, "n");
    else if (*raw.at != '"') sign_field(s, "j", raw);
    else {
        inside.at++;
        inside.size -= 2;
        sign_field(s, "b", inside);
    }
}

/* What every signature begins with: who says what kind of thing to whom. */
static void sign_begin(sha256 *s, const duly *d, const char *kind, const char *reader) {
    hmac_begin(s, d, 0x36);
    sign_text(s, "duly-fd-1");
    sign_text(s, d->prefix);
    sign_text(s, kind);
    sign_text(s, d->name);
    sign_text(s, reader);
}

bool duly_sign_with(duly *d, const char *key) {
    const char *colon = strchr(key, ':');
    uint8_t secret[DULY_KEY + 3];
    size_t size = 0;
    if (!colon || colon - key != DULY_KID || strlen(colon + 1) != 44) return false;
    duly_text text = {colon + 1, 44};
    if (!decode64(text, (char *)secret, &size) || size != DULY_KEY) return false;
    memcpy(d->key, secret, DULY_KEY);
    memcpy(d->kid, key, DULY_KID);
    d->kid[DULY_KID] = 0;
    return true;
}

/* The time since 1970; 0 while it is not known. */
static uint64_t time_of(const duly *d) {
    uint64_t now = d->port->time_ms(d->port->context);
    return now < EARLIEST_MS ? 0 : now;
}

/* ── flash: a log in one area; when it is full, what is still needed is written into the next one ───────────
 *
 * An area begins with its head: magic, generation, check. The head is written last, so an area with a head is
 * whole. A record is its size (2 bytes), its kind, a zero, its body, and a check of all that, to a multiple of
 * 4 bytes. A record that a power cut has torn ends the log, and the next one goes into another area. */

static uint32_t padded(size_t body) { return (uint32_t)((RECORD_HEAD + body + 4 + 3) & ~(size_t)3); }


static void raise_mark(duly *d, uint32_t sender, const duly_id *id) {
    duly_mark *free_slot = NULL, *mark = NULL;
    for (unsigned i = 0; i < DULY_SENDERS; i++) {
        if (d->marks[i].sender == sender && sender) mark = &d->marks[i];
        else if (!d->marks[i].sender && !free_slot) free_slot = &d->marks[i];
    }
    if (!mark && sender) mark = free_slot;
    if (!mark) mark = &d->marks[DULY_SENDERS], sender = 0; /* of every sender */
    if (mark->sender != sender || compare(id, &mark->id) > 0) mark->id = *id;
    mark->sender = sender;
}

static bool same_command(const duly_entry *one, const duly_entry *other) {
    return one->sender == other->sender && !compare(&one->id, &other->id);
}

static duly_entry *find(duly *d, const duly_entry *entry) {
    for (unsigned i = d->count; i--;)
        if (same_command(&d->ids[i], entry)) return &d->ids[i];
    return NULL;
}

static duly_entry *remember(duly *d, const duly_entry *new_entry) {
    duly_entry *entry = find(d, new_entry);
    if (!entry) {
        if (d->count == DULY_IDS) {
            raise_mark(d, d->ids[0].sender, &d->ids[0].id);
            memmove(d->ids, d->ids + 1, (DULY_IDS - 1) * sizeof *d->ids);
            d->count--;
        }
        entry = &d->ids[d->count++];
    }
    *entry = *new_entry;
    return entry;
}

static size_t write_entry(uint8_t *body, const duly_entry *entry) {
    memcpy(body, entry->id.bytes, DULY_ID);
    put(body + DULY_ID, entry->print, 2);
    put(body + DULY_ID + 2, entry->sender, 4);
    put(body + DULY_ID + 6, entry->lane, 2);
    return ID_SIZE;
}

static duly_entry read_entry(const uint8_t *body, uint8_t kind, size_t size) {
    duly_entry entry;
    memcpy(entry.id.bytes, body, DULY_ID);
    entry.print = (uint16_t)get(body + DULY_ID, 2);
    entry.sender = (uint32_t)get(body + DULY_ID + 2, 4);
    entry.lane = (uint16_t)get(body + DULY_ID + 6, 2);
    entry.stage = kind;
    entry.code = kind == ANSWERED && size > ID_SIZE ? body[ID_SIZE] : 0;
    return entry;
}

/* Read the record at `at` of an area into `body`: its size, or -1 at the end of the log. */
static int read_record(duly *d, uint32_t area, uint32_t at, uint8_t *kind, uint8_t *body) {
    uint8_t head[RECORD_HEAD], check[4];
    const duly_port *p = d->port;
    uint32_t base = area * p->area_size;
    if (at + RECORD_HEAD + 4 > p->area_size || !p->flash_read(p->context, base + at, head, sizeof head)) return -1;
    size_t size = (size_t)get(head, 2);
    if (size > DULY_RECORD || head[3] || at + padded(size) > p->area_size) return -1;
    if (!p->flash_read(p->context, base + at + RECORD_HEAD, body, size)) return -1;
    if (!p->flash_read(p->context, base + at + RECORD_HEAD + (uint32_t)size, check, sizeof check)) return -1;
    if (get(check, 4) != crc32(crc32(0, head, sizeof head), body, size)) return -1;
    *kind = head[2];
    return (int)size;
}

static bool write_record(duly *d, uint32_t area, uint32_t at, uint8_t kind, const uint8_t *body, size_t size) {
    uint8_t record[RECORD_HEAD + DULY_RECORD + 8];
    uint32_t whole = padded(size);
    memset(record, 0xFF, sizeof record);
    put(record, size, 2);
    record[2] = kind;
    record[3] = 0;
    memcpy(record + RECORD_HEAD, body, size);
    put(record + RECORD_HEAD + size, crc32(0, record, RECORD_HEAD + size), 4);
    return d->port->flash_write(d->port->context, area * d->port->area_size + at, record, whole);
}

/* The answer of an id, as it stands in flash: its size, or -1 if only the code was kept. */
static int stored_answer(duly *d, const duly_entry *entry, uint8_t *body) {
    uint8_t kind = 0, other[DULY_RECORD];
    int size, found = -1;
    for (uint32_t at = AREA_HEAD; (size = read_record(d, d->area, at, &kind, other)) >= 0; at += padded((size_t)size)) {
        if (kind != ANSWERED || (size_t)size <= ID_SIZE) continue;
        duly_entry one = read_entry(other, kind, (size_t)size);
        if (same_command(&one, entry)) {
            found = size;
            memcpy(body, other, (size_t)size);
        }
    }
    return found;
}

#define MARK_SIZE (DULY_ID + 4u)

static void write_mark(uint8_t *body, const duly_mark *mark) {
    memcpy(body, mark->id.bytes, DULY_ID);
    put(body + DULY_ID, mark->sender, 4);
}

/* Whether a record says the last word on an id that is still remembered. */
static bool is_current(duly *d, uint8_t kind, const uint8_t *body, size_t size) {
    if ((kind != BEGUN && kind != ANSWERED) || size < ID_SIZE) return false;
    duly_entry entry = read_entry(body, kind, size);
    const duly_entry *known = find(d, &entry);
    return known && known->stage == kind;
}

/* Copy what is remembered of ids into another area, in order; of the oldest answers only the code, if there is not
 * room for all and as much again. Where it ends, or 0. */
static uint32_t copy_ids(duly *d, uint32_t area, uint32_t to) {
    uint8_t body[DULY_RECORD], kind = 0;
    uint32_t sum = 0, most = d->port->area_size / 2;
    int size;
    for (uint32_t at = AREA_HEAD; (size = read_record(d, d->area, at, &kind, body)) >= 0; at += padded((size_t)size))
        if (is_current(d, kind, body, (size_t)size)) sum += padded((size_t)size);
    for (uint32_t at = AREA_HEAD; (size = read_record(d, d->area, at, &kind, body)) >= 0; at += padded((size_t)size)) {
        size_t keep = (size_t)size;
        if (!is_current(d, kind, body, keep)) continue;
        if (sum > most && keep > ID_SIZE + 1) keep = ID_SIZE + 1;
        sum -= padded((size_t)size) - padded(keep);
        if (!write_record(d, area, to, kind, body, keep)) return 0;
        to += padded(keep);
    }
    return to;
}

/* Write what is still needed into the next area, then its head. */
static bool rewrite(duly *d) {
    const duly_port *p = d->port;
    uint32_t area = (d->area + 1) % p->areas, at = AREA_HEAD, moved[DULY_PUSHES];
    uint8_t body[DULY_RECORD], head[AREA_HEAD];
    if (!p->flash_erase(p->context, area)) return false;
    if (!write_record(d, area, at, MINTED, d->minted.bytes, DULY_ID)) return false;
    at += padded(DULY_ID);
    for (unsigned i = 0; i <= DULY_SENDERS; i++) {
        if (!ms_of(&d->marks[i].id)) continue;
        write_mark(body, &d->marks[i]);
        if (!write_record(d, area, at, MARK, body, MARK_SIZE)) return false;
        at += padded(MARK_SIZE);
    }
    if (d->lost) { /* a restart must not forget that it is */
        memset(body, 0, DULY_ID);
        if (!write_record(d, area, at, LOST, body, DULY_ID)) return false;
        at += padded(DULY_ID);
    }
    if (!(at = copy_ids(d, area, at))) return false;
    for (unsigned i = 0; i < DULY_PUSHES; i++) {
        uint8_t kind;
        int size;
        moved[i] = 0;
        if (!d->pushes[i].at || (size = read_record(d, d->area, d->pushes[i].at, &kind, body)) < 0) continue;
        if (!write_record(d, area, at, PUSH, body, (size_t)size)) return false;
        moved[i] = at;
        at += padded((size_t)size);
    }
    put(head, MAGIC, 4);
    put(head + 4, d->generation + 1, 4);
    put(head + 8, crc32(0, head, 8), 4);
    if (!p->flash_write(p->context, area * p->area_size, head, sizeof head)) return false;
    d->area = area;
    d->generation++;
    d->end = at;
    for (unsigned i = 0; i < DULY_PUSHES; i++)
        if (d->pushes[i].at) d->pushes[i].at = moved[i];
    return true;
}

/* Append a record; where it stands, or 0 if it could not be written. */
static uint32_t append(duly *d, uint8_t kind, const uint8_t *body, size_t size) {
    if (d->end + padded(size) > d->port->area_size && !rewrite(d)) return 0;
    uint32_t at = d->end;
    if (at + padded(size) > d->port->area_size) return 0;
    if (!write_record(d, d->area, at, kind, body, size)) {
        d->end = d->port->area_size; /* part of it may stand there: the next one goes into another area */
        return 0;
    }
    d->end += padded(size);
    return at;
}

static void load_record(duly *d, uint8_t kind, const uint8_t *body, size_t size, uint32_t at) {
    duly_id id;
    if (size < DULY_ID) return;
    memcpy(id.bytes, body, DULY_ID);
    if ((kind == BEGUN || kind == ANSWERED) && size >= ID_SIZE) {
        duly_entry entry = read_entry(body, kind, size);
        remember(d, &entry);
    } else if (kind == MARK && size >= MARK_SIZE) {
        uint32_t sender = (uint32_t)get(body + DULY_ID, 4);
        raise_mark(d, sender, &id);
        if (!sender) d->lost = false; /* the marks that were there before stand before LOST */
    } else if (kind == LOST) {
        d->lost = true;
    } else if (compare(&id, &d->minted) > 0) {
        d->minted = id;
    }
    for (unsigned i = 0; (kind == PUSH || kind == PUSHED) && i < DULY_PUSHES; i++) {
        duly_push_slot *slot = &d->pushes[i];
        bool same = slot->at && !compare(&slot->id, &id);
        if (kind == PUSHED && same) slot->at = 0;
        if (kind == PUSH && !slot->at) {
            slot->id = id;
            slot->at = at;
            return;
        }
    }
}

/* Whether an area without a sound head has held something: else the power went when flash was new. */
static bool was_used(duly *d, uint32_t area, const uint8_t *head) {
    uint8_t body[DULY_RECORD], kind = 0, next[2] = {0, 0};
    bool erased = true;
    for (unsigned i = 0; i < AREA_HEAD; i++) erased = erased && head[i] == 0xFF;
    if (erased) return false;
    if (read_record(d, area, AREA_HEAD, &kind, body) != DULY_ID || kind != MINTED) return true;
    uint32_t at = area * d->port->area_size + AREA_HEAD + padded(DULY_ID);
    d->port->flash_read(d->port->context, at, next, sizeof next);
    return get(body, 8) || get(next, 2) != 0xFFFF;
}

static bool load(duly *d) {
    const duly_port *p = d->port;
    bool found = false, used = false;
    uint8_t head[AREA_HEAD], body[DULY_RECORD], kind = 0;
    for (uint32_t area = 0; area < p->areas; area++) {
        if (!p->flash_read(p->context, area * p->area_size, head, sizeof head)) return false;
        if (get(head, 4) != MAGIC || get(head + 8, 4) != crc32(0, head, 8)) {
            used = used || was_used(d, area, head);
            continue;
        }
        uint32_t generation = (uint32_t)get(head + 4, 4);
        if (!found || (int32_t)(generation - d->generation) > 0) {
            d->area = area;
            d->generation = generation;
        }
        found = true;
    }
    if (!found) { /* new flash, or nothing in it can be read */
        d->lost = used;
        d->area = p->areas - 1;
        return rewrite(d);
    }
    int size;
    uint32_t at = AREA_HEAD;
    while ((size = read_record(d, d->area, at, &kind, body)) >= 0) {
        load_record(d, kind, body, (size_t)size, at);
        at += padded((size_t)size);
    }
    d->end = at;
    bool clean = true;
    for (uint32_t i = at; i < p->area_size && clean; i += sizeof body) {
        size_t part = p->area_size - i < sizeof body ? p->area_size - i : sizeof body;
        if (!p->flash_read(p->context, d->area * p->area_size + i, body, part)) return false;
        for (size_t k = 0; k < part; k++) clean = clean && body[k] == 0xFF;
    }
    return clean || rewrite(d);
}

/* ── MQTT 3.1.1 ─────────────────────────────────────────────────────────────────────────────────────────── */

static void disconnect(duly *d) {
    if (d->state != DULY_OFFLINE) d->port->close(d->port->context);
    d->state = DULY_OFFLINE;
    d->received = d->skip = 0;
    d->held_until = 0;
    uint32_t spread = d->backoff / 2 + 250; /* so that not all devices come back at once */
    d->next_try = d->port->uptime_ms(d->port->context) + d->backoff + d->port->random(d->port->context) % spread;
    d->backoff = d->backoff * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : d->backoff * 2;
}

/* A packet is written behind room for its head: a type and a length of at most 3 bytes. */
#define PACKET_HEAD 4u

typedef struct packet {
    duly *device;
    size_t end;
    bool fits;
} packet;

static packet begin_packet(duly *d) {
    packet p = {d, PACKET_HEAD, true};
    return p;
}

static void add(packet *p, const void *bytes, size_t size) {
    p->fits = p->fits && p->end + size <= DULY_SEND;
    if (p->fits && size) memcpy(p->device->out + p->end, bytes, size);
    if (p->fits) p->end += size;
}

static void add_text(packet *p, const char *text) { add(p, text, strlen(text)); }

static void add_number(packet *p, uint64_t value) {
    char text[DIGITS + 1];
    add_text(p, digits_of(value, text));
}

static void add_16(packet *p, unsigned value) {
    uint8_t two[2] = {(uint8_t)(value >> 8), (uint8_t)value};
    add(p, two, 2);
}

static void add_string(packet *p, const char *text) {
    add_16(p, (unsigned)strlen(text));
    add_text(p, text);
}

static bool send_packet(packet *p, uint8_t type) {
    duly *d = p->device;
    uint8_t head[PACKET_HEAD];
    unsigned size = 0;
    size_t length = p->end - PACKET_HEAD;
    if (!p->fits) return false;
    head[size++] = type;
    do {
        head[size] = (uint8_t)(length & 127);
        length >>= 7;
        head[size++] |= length ? 128 : 0;
    } while (length);
    memcpy(d->out + PACKET_HEAD - size, head, size);
    d->last_sent = d->port->uptime_ms(d->port->context);
    if (d->port->send(d->port->context, d->out + PACKET_HEAD - size, p->end - PACKET_HEAD + size)) return true;
    disconnect(d);
    return false;
}

static packet begin_publish(duly *d, const char *user, const char *kind) {
    packet p = begin_packet(d);
    add_16(&p, (unsigned)(strlen(d->prefix) + strlen(user) + strlen(kind) + 2));
    add_text(&p, d->prefix);
    add_text(&p, "/");
    add_text(&p, user);
    add_text(&p, "/");
    add_text(&p, kind);
    if (!++d->packet) d->packet = 1;
    add_16(&p, d->packet);
    return p;
}

/* The signature of what was added to a hash, and the name of its key. */
static void add_signature(packet *p, sha256 *s) {
    uint8_t digest[32];
    char text[4];
    hmac_end(s, p->device, digest);
    add_text(p, ",\"sig\":\"");
    for (unsigned i = 0; i < sizeof digest; i += 3) {
        encode64(text, digest + i, sizeof digest - i < 3 ? sizeof digest - i : 3);
        add(p, text, 4);
    }
    add_text(p, "\",\"kid\":\"");
    add_text(p, p->device->kid);
    add_text(p, "\"");
}

static void sign_session(sha256 *s, uint64_t session) {
    char text[17];
    hex_of(session, text);
    sign_text(s, text);
}

/* End a status: sign it, if there is a key. `data` is what stands in it. */
static void end_status(packet *p, bool online, uint64_t seconds, duly_text data) {
    duly *d = p->device;
    sha256 s;
    if (d->kid[0] && p->fits) {
        sign_begin(&s, d, "status", "");
        sign_number(&s, (int64_t)seconds);
        sign_number(&s, online);
        if (online && d->battery >= 0) sign_number(&s, d->battery);
        else sign_text(&s, "");
        if (online && d->rssi < 0) sign_number(&s, d->rssi);
        else sign_text(&s, "");
        sign_text(&s, ""); /* ip */
        sign_text(&s, online && d->version ? d->version : "");
        sign_number(&s, 0); /* uptime */
        sign_session(&s, d->session);
        sign_content(&s, data);
        if (online) sign_number(&s, (int64_t)DULY_HEARTBEAT_S * 1000);
        add_signature(p, &s);
    }
    add_text(p, "}");
}

/* Begin a status; the time in it. */
static uint64_t add_status(packet *p, bool online) {
    duly *d = p->device;
    char session[17];
    uint64_t seconds = time_of(d) / 1000;
    hex_of(d->session, session);
    add_text(p, "{\"time\":");
    add_number(p, seconds);
    add_text(p, online ? ",\"online\":true,\"session\":\"" : ",\"online\":false,\"session\":\"");
    add_text(p, session);
    add_text(p, "\"");
    if (online) {
        add_text(p, ",\"heartbeat\":");
        add_number(p, DULY_HEARTBEAT_S);
    }
    if (online && d->version) {
        add_text(p, ",\"version\":\"");
        add_text(p, d->version);
        add_text(p, "\"");
    }
    if (online && d->battery >= 0) {
        add_text(p, ",\"battery\":");
        add_number(p, (uint64_t)d->battery);
    }
    if (online && d->rssi < 0) {
        add_text(p, ",\"rssi\":-");
        add_number(p, (uint64_t)-(int64_t)d->rssi);
    }
    return seconds;
}

static void connect(duly *d) {
    const duly_port *p = d->port;
    const duly_text none = {"", 0};
    d->received = d->skip = 0;
    d->refused = 0;
    d->session = (uint64_t)p->random(p->context) << 32 | p->random(p->context);
    d->last_heard = p->uptime_ms(p->context);
    if (!p->open(p->context)) {
        d->state = DULY_CONNECTING;
        disconnect(d);
        return;
    }
    d->state = DULY_CONNECTING;
    packet out = begin_packet(d);
    add_string(&out, "MQTT");
    add(&out, "\x04\xEC", 2); /* 3.1.1; username, password, will kept with QoS 1; the session is kept */
    add_16(&out, DULY_KEEP_ALIVE_S);
    add_string(&out, d->name);
    add_16(&out, (unsigned)(strlen(d->prefix) + strlen(d->name) + sizeof "//status" - 1));
    add_text(&out, d->prefix);
    add_text(&out, "/");
    add_text(&out, d->name);
    add_text(&out, "/status");
    size_t length_at = out.end;
    add_16(&out, 0);
    end_status(&out, false, add_status(&out, false), none);
    if (out.fits) {
        d->out[length_at] = (uint8_t)((out.end - length_at - 2) >> 8);
        d->out[length_at + 1] = (uint8_t)(out.end - length_at - 2);
    }
    add_string(&out, d->name);
    add_string(&out, d->token);
    if (!send_packet(&out, CONNECT) && d->state != DULY_OFFLINE) disconnect(d); /* it does not fit */
}

static bool say_online(duly *d) {
    packet out = begin_publish(d, d->name, "status");
    const duly_text none = {"", 0};
    end_status(&out, true, add_status(&out, true), none);
    d->next_status = d->port->uptime_ms(d->port->context) + DULY_HEARTBEAT_S * 1000u;
    return send_packet(&out, PUBLISH | QOS1 | RETAIN);
}

static void connected(duly *d) {
    static const char *const kinds[] = {"/pending", "/ack", "/failed"};
    packet out = begin_packet(d);
    add_16(&out, 1);
    for (unsigned i = 0; i < 3; i++) {
        add_16(&out, (unsigned)(strlen(d->prefix) + 1 + strlen(d->name) + strlen(kinds[i])));
        add_text(&out, d->prefix);
        add_text(&out, "/");
        add_text(&out, d->name);
        add_text(&out, kinds[i]);
        add(&out, "\x01", 1);
    }
    d->packet = 1;
    d->state = DULY_ONLINE;
    d->next_push = 0;
    if (send_packet(&out, SUBSCRIBE)) say_online(d);
}

/* ── answers ────────────────────────────────────────────────────────────────────────────────────────────── */

/* Add a content, and return it as it stands. A string that is to be signed goes as base64: what is signed of a string
 * is what it spells, and that of base64 is seen without a table of escapes. */
static duly_text add_content(packet *p, duly_text json) {
    duly_text raw = {(const char *)p->device->out + p->end, 0};
    const char *end = json.at + json.size, *at = skip_space(json.at, end);
    while (end > at && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\n' || end[-1] == '\r')) end--;
    size_t from = p->end, size = (size_t)(end - at);
    if (!p->device->kid[0] || !size || *at != '"') add(p, at, size);
    else {
        char text[4];
        add_text(p, "\"");
        for (size_t i = 0; i < size; i += 3) {
            encode64(text, (const uint8_t *)at + i, size - i < 3 ? size - i : 3);
            add(p, text, 4);
        }
        add_text(p, "\"");
    }
    raw.size = p->fits ? p->end - from : 0;
    return raw;
}

static bool say(duly *d, const char *kind, duly_text msg_id, const char *field, duly_text json) {
    if (d->state != DULY_ONLINE) return false;
    packet out = begin_publish(d, "hub", kind);
    duly_text raw = {"", 0};
    sha256 s;
    add_text(&out, "{\"msg_id\":\"");
    add(&out, msg_id.at, msg_id.size);
    add_text(&out, "\"");
    if (json.size) {
        add_text(&out, ",\"");
        add_text(&out, field);
        add_text(&out, "\":");
        raw = add_content(&out, json);
        add_text(&out, d->kid[0] && raw.size && *raw.at == '"' ? ",\"enc\":\"base64\"" : ",\"enc\":\"json\"");
    }
    if (d->kid[0] && out.fits) {
        sign_begin(&s, d, kind, "hub");
        sign_field(&s, "", msg_id);
        sign_content(&s, raw);
        add_signature(&out, &s);
    }
    add_text(&out, "}");
    return send_packet(&out, PUBLISH | QOS1);
}

static void answer(duly *d, duly_text msg_id, unsigned code, duly_text json, const char *state) {
    char why[64] = "{\"code\":", text[DIGITS + 1];
    if (code == DULY_DONE) {
        if (!say(d, "complete", msg_id, "value", json) && d->state == DULY_ONLINE) {
            duly_text none = {"", 0};
            say(d, "complete", msg_id, "value", none); /* it did not fit into a packet */
        }
        return;
    }
    strcat(why, digits_of(code, text));
    if (state) { /* a word of ours */
        strcat(why, ",\"state\":\"");
        strcat(why, state);
        strcat(why, "\"");
    }
    strcat(why, "}");
    duly_text error = {why, strlen(why)};
    say(d, "failed", msg_id, "error", error);
}

static void answer_again(duly *d, const duly_entry *entry, duly_text msg_id) {
    uint8_t body[DULY_RECORD];
    int size = stored_answer(d, entry, body);
    duly_text json = {"", 0};
    if (size > (int)ID_SIZE + 1) {
        json.at = (const char *)body + ID_SIZE + 1;
        json.size = (size_t)size - ID_SIZE - 1;
    }
    answer(d, msg_id, entry->code, json, NULL);
}

/* Store an answer, then send it. */
static bool end_command(duly *d, duly_entry *entry, duly_text msg_id, unsigned code, const char *json) {
    uint8_t body[DULY_RECORD];
    duly_text text = {json ? json : "", json ? strlen(json) : 0};
    size_t size = write_entry(body, entry);
    body[size++] = (uint8_t)code;
    if (text.size <= DULY_ANSWER) {
        if (text.size) memcpy(body + size, text.at, text.size);
        size += text.size;
    }
    bool stored = append(d, ANSWERED, body, size) != 0;
    if (stored) { /* not before: until then flash holds only that it was begun */
        entry->stage = ANSWERED;
        entry->code = (uint8_t)code;
    }
    answer(d, msg_id, code, text, NULL);
    return stored;
}

bool duly_finish(duly *d, enum duly_code code, const char *json) {
    if (!d->at_work) return false;
    duly_text msg_id = {d->work_msg_id, strlen(d->work_msg_id)};
    d->at_work = false;
    return end_command(d, &d->ids[d->count - 1], msg_id, (unsigned)code, json);
}

bool duly_working(duly *d, const char *progress) {
    duly_text msg_id = {d->work_msg_id, strlen(d->work_msg_id)};
    duly_text json = {progress ? progress : "true", strlen(progress ? progress : "true")};
    return d->at_work && say(d, "ack", msg_id, "progress", json);
}

/* ── commands ───────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct task {
    duly_command command;
    duly_text msg_id;
    duly_entry entry;
    int64_t after; /* the counter of the one before it; -1: none */
    uint64_t exp_ms;
} task;

/* msg_id is {app}:{seq_id}:{tag}, seq_id is {ms}_{n}. */
static bool read_ids(task *t) {
    const char *at = t->msg_id.at, *end = at + t->msg_id.size, *first = NULL, *last = NULL, *bar = NULL;
    for (const char *c = at; c < end; c++) {
        if (*c != ':') continue;
        first = first ? first : c;
        last = c;
    }
    if (!first || first == last) return false;
    t->command.sender.at = at;
    t->command.sender.size = (size_t)(first - at);
    t->command.id.at = first + 1;
    t->command.id.size = (size_t)(last - first - 1);
    for (const char *c = first; c < last; c++)
        if (*c == '_') bar = c;
    if (!bar) return false;
    uint64_t ms, n;
    duly_text time = {first + 1, (size_t)(bar - first - 1)}, count = {bar + 1, (size_t)(last - bar - 1)};
    if (!number(time, &ms) || ms >> 48 || !number(count, &n) || n >> 63) return false;
    t->entry.id = make_id(ms, n);
    t->entry.sender = hash(0, at, t->command.sender.size);
    return true;
}

/* Everything but its data. */
static bool read_task(duly_text message, task *t) {
    uint64_t value;
    memset(t, 0, sizeof *t);
    t->msg_id = duly_field(message, "msg_id");
    t->after = -1;
    if (!t->msg_id.size || t->msg_id.size >= DULY_MSG_ID || !read_ids(t)) return false;
    t->command.type = duly_field(message, "action");
    duly_text exp = raw_field(message, "exp");
    if (number(exp, &value)) t->exp_ms = value > UINT64_MAX / 1000 ? UINT64_MAX : value * 1000;
    else if (exp.size && !duly_is(exp, "null")) return false; /* until when it may be begun cannot be read */
    duly_text order = raw_field(message, "order");
    if (order.size && *order.at == '{' && !duly_is(duly_field(order, "mode"), "any")) {
        duly_text key = duly_field(order, "key");
        t->entry.lane = (uint16_t)(hash(0, key.at, key.size) | 1);
        if (number(raw_field(order, "after"), &value)) t->after = (int64_t)value;
    }
    return t->command.type.size != 0;
}

/* Its data, which is decoded where it stands: once. False if it cannot be. */
static bool read_data(duly_text message, task *t) {
    bool sound;
    t->command.data = content(message, "payload", &sound);
    uint32_t print = hash(0, t->command.type.at, t->command.type.size);
    t->entry.print = (uint16_t)(hash(print, t->command.data.at, t->command.data.size) >> 8);
    return sound;
}

static bool forgot(duly *d, const duly_entry *entry) {
    uint64_t now = time_of(d);
    if (d->lost && now) { /* no id from before now is accepted */
        uint8_t body[MARK_SIZE];
        duly_mark mark = {make_id(now, UINT64_MAX), 0};
        raise_mark(d, 0, &mark.id);
        write_mark(body, &mark);
        d->lost = !append(d, MARK, body, sizeof body);
    }
    if (d->lost) return true;
    for (unsigned i = 0; i <= DULY_SENDERS; i++) {
        const duly_mark *mark = &d->marks[i];
        bool of_it = i == DULY_SENDERS || mark->sender == entry->sender;
        if (of_it && compare(&entry->id, &mark->id) <= 0) return true;
    }
    return false;
}

/* Whether a later one of its lane has begun, or is done. */
static bool is_superseded(const duly *d, const duly_entry *entry) {
    for (unsigned i = 0; entry->lane && i < d->count; i++) {
        const duly_entry *one = &d->ids[i];
        bool failed = one->stage == ANSWERED && one->code != DULY_DONE;
        bool same_lane = one->sender == entry->sender && one->lane == entry->lane;
        if (same_lane && !failed && compare(&one->id, &entry->id) > 0) return true;
    }
    return false;
}

/* Whether the one before it has not come yet. */
static bool has_gap(const duly *d, const task *t) {
    if (!t->entry.lane || t->after < 0) return false;
    for (unsigned i = 0; i < d->count; i++)
        if (d->ids[i].sender == t->entry.sender && n_of(&d->ids[i].id) == (uint64_t)t->after) return false;
    return true;
}

static int handler_of(const duly *d, duly_text type) {
    int any = -1;
    for (int i = 0; i < d->handlers; i++) {
        if (!d->on[i].type) any = i;
        else if (duly_is(type, d->on[i].type)) return i;
    }
    return any;
}

static void run(duly *d, const task *t, duly_entry *begun) {
    char json[DULY_ANSWER + 1];
    uint8_t body[ID_SIZE];
    const duly_text none = {"", 0};
    uint64_t now = time_of(d);
    int at = handler_of(d, t->command.type);
    bool timeless = t->exp_ms && !now && !DULY_TIMELESS; /* it may be hours late, out of a broker that kept it */
    bool late = t->exp_ms && now && now > t->exp_ms;
    if (begun && (timeless || late)) return; /* not again, and it may have happened: the hub ends it as unknown */
    if (timeless) {
        answer(d, t->msg_id, DULY_BUSY, none, NULL);
        return;
    }
    if (late) {
        answer(d, t->msg_id, DULY_TIMEOUT, none, "expired");
        return;
    }
    if (!begun && is_superseded(d, &t->entry)) {
        answer(d, t->msg_id, DULY_TIMEOUT, none, "superseded");
        return;
    }
    if (!begun) {
        duly_entry entry = t->entry;
        entry.stage = BEGUN;
        write_entry(body, &entry);
        if (!append(d, BEGUN, body, ID_SIZE)) {
            answer(d, t->msg_id, DULY_OUT_OF_RESOURCES, none, NULL); /* it is not stored, so it is not done */
            return;
        }
        begun = remember(d, &entry);
    }
    say(d, "ack", t->msg_id, "", none);
    json[0] = 0;
    duly_entry *last = &d->ids[d->count - 1]; /* what is at work is found there */
    if (begun != last) {
        duly_entry moved = *begun;
        memmove(begun, begun + 1, (size_t)(last - begun) * sizeof *begun);
        *last = moved;
    }
    memcpy(d->work_msg_id, t->msg_id.at, t->msg_id.size);
    d->work_msg_id[t->msg_id.size] = 0;
    d->at_work = true; /* so that a handler may report, or finish at once */
    int code = d->on[at].handler(d, d->on[at].context, &t->command, json, sizeof json);
    if (code != DULY_LATER && d->at_work) {
        json[DULY_ANSWER] = 0;
        duly_finish(d, (enum duly_code)code, json[0] ? json : NULL);
    }
}

/* Take a command that has come. False if it is to be held until the one before it has come. */
static bool take(duly *d, duly_text message, bool may_wait) {
    task t;
    const duly_text none = {"", 0};
    if (!is_object(message)) return true;
    if (!read_task(message, &t)) {
        if (t.msg_id.size && t.msg_id.size < DULY_MSG_ID) answer(d, t.msg_id, DULY_BAD_PARAMETERS, none, NULL);
        return true;
    }
    duly_entry *entry = find(d, &t.entry);
    int at = handler_of(d, t.command.type);
    if (!entry && forgot(d, &t.entry)) return true; /* it may have run; the hub ends it as unknown */
    if (!entry && at >= 0 && may_wait && has_gap(d, &t)) return false;
    if (!read_data(message, &t)) answer(d, t.msg_id, DULY_BAD_PARAMETERS, none, NULL);
    else if (at < 0) answer(d, t.msg_id, DULY_NOT_SUPPORTED, none, NULL);
    else if (!entry) run(d, &t, NULL);
    else if (entry->print != t.entry.print) answer(d, t.msg_id, DULY_BAD_PARAMETERS, none, NULL);
    else if (entry->stage == ANSWERED) answer_again(d, entry, t.msg_id);
    else if (d->on[at].effect == DULY_AT_LEAST_ONCE) {
        t.command.again = true;
        run(d, &t, entry);
    }
    return true;
}

/* Take a command, or keep it for a moment: the one before it may be on its way. */
static void take_or_hold(duly *d, duly_text message) {
#if DULY_HOLD
    bool may_wait = !d->held_until && message.size <= DULY_HOLD;
    if (take(d, message, may_wait)) return;
    memcpy(d->held, message.at, message.size);
    d->held_size = (uint16_t)message.size;
    d->held_until = d->port->uptime_ms(d->port->context) + DULY_HOLD_MS;
#else
    take(d, message, false);
#endif
}

/* Take the command that is kept, if the one before it has come or its time is up. */
static void release(duly *d) {
#if DULY_HOLD
    if (!d->held_until || d->at_work) return;
    duly_text message = {(const char *)d->held, d->held_size};
    uint64_t until = d->held_until;
    d->held_until = 0;
    if (!take(d, message, d->port->uptime_ms(d->port->context) < until)) d->held_until = until;
#else
    (void)d;
#endif
}

/* ── pushes ─────────────────────────────────────────────────────────────────────────────────────────────── */

static void add_id(packet *p, const duly_id *id) {
    add_number(p, ms_of(id));
    add_text(p, "_");
    add_number(p, n_of(id));
}

#define PUSH_HEAD (DULY_ID + 1u) /* of a push in a record: id, size of the type; type and data follow */

static bool send_push(duly *d, const duly_push_slot *slot) {
    uint8_t body[DULY_RECORD], kind;
    int size = read_record(d, d->area, slot->at, &kind, body);
    if (size < (int)PUSH_HEAD || (int)PUSH_HEAD + body[DULY_ID] > size) return false;
    const uint8_t *type = body + PUSH_HEAD, *data = type + body[DULY_ID];
    packet out = begin_publish(d, d->name, "status");
    uint64_t seconds = add_status(&out, true);
    add_text(&out, ",\"data\":");
    size_t from = out.end;
    add_text(&out, "{\"type\":\"");
    add(&out, type, body[DULY_ID]);
    add_text(&out, "\",\"seq_id\":\"");
    add_id(&out, &slot->id);
    add_text(&out, "\"");
    if (data < body + size) {
        add_text(&out, ",\"data\":");
        add(&out, data, (size_t)(body + size - data));
    }
    add_text(&out, "}");
    duly_text said = {(const char *)d->out + from, out.end - from};
    add_text(&out, ",\"enc\":\"json\"");
    end_status(&out, true, seconds, said);
    return send_packet(&out, PUBLISH | QOS1);
}

static void send_pushes(duly *d) {
    d->next_push = d->port->uptime_ms(d->port->context) + DULY_PUSH_AGAIN_MS;
    duly_id sent = make_id(0, 0);
    for (unsigned k = 0; k < DULY_PUSHES && d->state == DULY_ONLINE; k++) { /* in order of their ids */
        const duly_push_slot *next = NULL;
        for (unsigned i = 0; i < DULY_PUSHES; i++) {
            const duly_push_slot *one = &d->pushes[i];
            bool unsent = one->at && compare(&one->id, &sent) > 0;
            if (unsent && (!next || compare(&next->id, &one->id) > 0)) next = one;
        }
        if (!next) return;
        sent = next->id;
        send_push(d, next);
    }
}

bool duly_push(duly *d, const char *type, const char *data) {
    uint8_t body[DULY_RECORD];
    size_t type_size = strlen(type), data_size = data ? strlen(data) : 0;
    uint64_t now = time_of(d);
    duly_push_slot *slot = NULL;
    for (unsigned i = 0; i < DULY_PUSHES && !slot; i++)
        if (!d->pushes[i].at) slot = &d->pushes[i];
    if (!slot || !type_size || type_size > 64 || PUSH_HEAD + type_size + data_size > DULY_RECORD) return false;
    uint64_t last = ms_of(&d->minted);
    if (!now && !last) return false;
    duly_id id = make_id(now > last ? now : last, n_of(&d->minted) + 1);
    memcpy(body, id.bytes, DULY_ID);
    body[DULY_ID] = (uint8_t)type_size;
    memcpy(body + PUSH_HEAD, type, type_size);
    if (data_size) memcpy(body + PUSH_HEAD + type_size, data, data_size);
    uint32_t at = append(d, PUSH, body, PUSH_HEAD + type_size + data_size);
    if (!at) return false;
    d->minted = id;
    slot->id = id;
    slot->at = at;
    if (d->state == DULY_ONLINE) send_push(d, slot);
    return true;
}

unsigned duly_pushes_waiting(const duly *d) {
    unsigned waiting = 0;
    for (unsigned i = 0; i < DULY_PUSHES; i++) waiting += d->pushes[i].at != 0;
    return waiting;
}

/* The hub has stored a push, or refused it. */
static void push_answered(duly *d, duly_text message, bool refused) {
    bool sound;
    duly_text id = duly_field(message, "msg_id"), why = content(message, "error", &sound);
    uint64_t code = DULY_BAD_PARAMETERS;
    if (refused && number(raw_field(why, "code"), &code) && code == 4) return; /* it could not store it now */
    for (unsigned i = 0; i < DULY_PUSHES; i++) {
        char name[2 * (DIGITS + 1)] = "", text[DIGITS + 1];
        duly_push_slot *slot = &d->pushes[i];
        strcat(name, digits_of(ms_of(&slot->id), text));
        strcat(name, "_");
        strcat(name, digits_of(n_of(&slot->id), text));
        if (!slot->at || !duly_is(id, name)) continue;
        slot->at = 0; /* before the log may be rewritten */
        append(d, PUSHED, slot->id.bytes, DULY_ID);
        d->pushes_refused += refused;
    }
}

/* ── what arrives ───────────────────────────────────────────────────────────────────────────────────────── */

static void acknowledge(duly *d, unsigned id) {
    if (d->state != DULY_ONLINE) return;
    packet out = begin_packet(d);
    add_16(&out, id);
    send_packet(&out, PUBACK);
}

static bool topic_is(const duly *d, duly_text topic, const char *kind) {
    size_t prefix = strlen(d->prefix), name = strlen(d->name), last = strlen(kind);
    return topic.size == prefix + name + last + 2 && !memcmp(topic.at, d->prefix, prefix) &&
           topic.at[prefix] == '/' && !memcmp(topic.at + prefix + 1, d->name, name) &&
           topic.at[prefix + 1 + name] == '/' && !memcmp(topic.at + prefix + name + 2, kind, last);
}

/* A PUBLISH; `whole` is false if only its beginning fits into the buffer. */
static void published(duly *d, uint8_t type, const uint8_t *at, size_t size, bool whole) {
    unsigned qos = type >> 1 & 3, id = 0;
    size_t topic_size;
    if (size < 2 || (topic_size = (size_t)at[0] << 8 | at[1]) + 2 > size) return;
    duly_text topic = {(const char *)at + 2, topic_size};
    at += 2 + topic_size;
    size -= 2 + topic_size;
    if (qos && size < 2) return;
    if (qos) {
        id = (unsigned)at[0] << 8 | at[1];
        at += 2;
        size -= 2;
    }
    duly_text message = {(const char *)at, size};
    if (topic_is(d, topic, "pending")) {
        if (!whole) {
            duly_text msg_id = duly_field(message, "msg_id"), none = {"", 0};
            if (msg_id.size && msg_id.size < DULY_MSG_ID) answer(d, msg_id, DULY_OUT_OF_RESOURCES, none, NULL);
        } else take_or_hold(d, message);
    } else if (topic_is(d, topic, "ack")) push_answered(d, message, false);
    else if (topic_is(d, topic, "failed")) push_answered(d, message, true);
    if (qos) acknowledge(d, id);
}

/* The next packet in the buffer: how many bytes it takes, 0 if it is not there yet. */
static size_t packet_size(duly *d, size_t *head) {
    uint32_t length = 0;
    for (unsigned i = 1; i < 5; i++) {
        if (i >= d->received) return 0;
        length |= (uint32_t)(d->in[i] & 127) << 7 * (i - 1);
        if (d->in[i] & 128) continue;
        *head = i + 1;
        return *head + length;
    }
    disconnect(d); /* a length that is none */
    return 0;
}

/* The broker lets us hear what is for us, or not: then being connected is of no use. */
static void subscribed(duly *d, const uint8_t *body, size_t size) {
    for (size_t i = 2; i < size; i++) {
        if (!(body[i] & 0x80)) continue;
        d->refused = 0x80;
        disconnect(d);
        return;
    }
    d->backoff = BACKOFF_MIN_MS;
}

static void handle_packet(duly *d, size_t head, size_t size, bool whole) {
    const uint8_t *body = d->in + head;
    size -= head;
    switch (d->in[0] & 0xF0) {
    case CONNACK:
        d->refused = size < 2 ? 0 : body[1];
        if (d->state != DULY_CONNECTING || size < 2 || body[1]) disconnect(d);
        else connected(d);
        break;
    case PUBLISH:
        if (d->state == DULY_ONLINE) published(d, d->in[0], body, size, whole);
        else disconnect(d);
        break;
    case SUBACK:
        if (d->state != DULY_ONLINE) disconnect(d);
        else subscribed(d, body, size);
        break;
    case PUBACK:
    case PINGRESP:
        if (d->state != DULY_ONLINE) disconnect(d);
        break;
    default:
        disconnect(d);
    }
}

/* Whether the next packet is a message, and a handler is at work: it stays in the buffer until that has ended. */
static bool must_wait(const duly *d) { return d->at_work && d->received && (d->in[0] & 0xF0) == PUBLISH; }

/* Handle what is in the buffer, as far as it is whole. */
static void handle_packets(duly *d) {
    size_t head = 0, size;
    while (d->state != DULY_OFFLINE && !must_wait(d) && (size = packet_size(d, &head))) {
        bool whole = size <= DULY_RECEIVE;
        if (d->received < (whole ? size : DULY_RECEIVE)) return;
        size_t used = whole ? size : d->received;
        handle_packet(d, head, used, whole);
        if (d->state == DULY_OFFLINE) return;
        d->skip = size - used;
        d->received -= used;
        memmove(d->in, d->in + used, d->received);
    }
}

static void receive(duly *d) {
    for (unsigned turns = 0; turns < 32 && d->state != DULY_OFFLINE && !must_wait(d); turns++) {
        size_t room = d->skip && d->skip < DULY_RECEIVE ? d->skip : DULY_RECEIVE - d->received;
        int came = d->port->read(d->port->context, d->in + d->received, room);
        if (came < 0 || (size_t)came > room) {
            disconnect(d);
            return;
        }
        if (!came) return;
        d->last_heard = d->port->uptime_ms(d->port->context);
        if (d->skip) d->skip -= (size_t)came; /* the rest of a packet that was too long */
        else d->received += (size_t)came;
        handle_packets(d);
    }
}

static void keep_time(duly *d) {
    uint64_t now = d->port->uptime_ms(d->port->context);
    uint64_t silence = now - d->last_heard;
    if (d->state == DULY_CONNECTING && silence > ANSWER_WITHIN_MS) disconnect(d);
    if (d->state != DULY_ONLINE) return;
    if (!d->at_work && silence > DULY_KEEP_ALIVE_S * 1500u) {
        disconnect(d);
        return;
    }
    if (now - d->last_sent > DULY_KEEP_ALIVE_S * 500u) {
        packet out = begin_packet(d);
        send_packet(&out, PINGREQ);
    }
    if (d->state == DULY_ONLINE && now >= d->next_status) say_online(d);
    if (d->state == DULY_ONLINE && now >= d->next_push) send_pushes(d);
}

enum duly_state duly_poll(duly *d) {
    if (d->polling) { /* by a handler: the message that it works on is in the buffer */
        keep_time(d);
        return d->state;
    }
    d->polling = true;
    if (d->state == DULY_OFFLINE && d->port->uptime_ms(d->port->context) >= d->next_try) connect(d);
    handle_packets(d);
    receive(d);
    release(d);
    keep_time(d);
    d->polling = false;
    return d->state;
}

bool duly_begin(duly *d, const duly_port *port, const char *name, const char *token) {
    memset(d, 0, sizeof *d);
    d->port = port;
    d->name = name;
    d->token = token;
    d->prefix = "nodes";
    d->battery = -1;
    d->backoff = BACKOFF_MIN_MS;
    return port->areas >= 2 && port->area_size >= DULY_AREA_MIN && load(d);
}

bool duly_on(duly *d, const char *type, enum duly_effect effect, duly_handler handler, void *context) {
    if (d->handlers == DULY_HANDLERS) return false;
    d->on[d->handlers].type = type;
    d->on[d->handlers].effect = effect;
    d->on[d->handlers].handler = handler;
    d->on[d->handlers++].context = context;
    return true;
}
