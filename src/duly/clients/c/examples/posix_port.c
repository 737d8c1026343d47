#define _DEFAULT_SOURCE

#include "posix_port.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { AREAS = 2, AREA_SIZE = 32768, SEND_MS = 5000 };

static uint64_t clock_ms(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

static uint64_t uptime_ms(void *context) {
    (void)context;
    return clock_ms(CLOCK_MONOTONIC);
}

static uint64_t time_ms(void *context) {
    (void)context;
    return clock_ms(CLOCK_REALTIME);
}

static uint32_t random_bits(void *context) {
    uint32_t bits = 0;
    int file = open("/dev/urandom", O_RDONLY);
    (void)context;
    if (file < 0 || read(file, &bits, sizeof bits) != sizeof bits) bits = (uint32_t)clock_ms(CLOCK_MONOTONIC);
    if (file >= 0) close(file);
    return bits;
}

static void close_socket(void *context) {
    posix_port *posix = context;
    if (posix->socket >= 0) close(posix->socket);
    posix->socket = -1;
}

static bool open_socket(void *context) {
    posix_port *posix = context;
    struct addrinfo hints, *found = NULL;
    int on = 1;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    int unknown = getaddrinfo(posix->host, posix->service, &hints, &found);
    if (unknown) {
        snprintf(posix->problem, sizeof posix->problem, "%s", gai_strerror(unknown));
        return false;
    }
    bool up = false;
    for (const struct addrinfo *one = found; one && !up; one = one->ai_next) { /* "localhost" has two addresses */
        posix->socket = socket(one->ai_family, one->ai_socktype, one->ai_protocol);
        up = posix->socket >= 0 && !connect(posix->socket, one->ai_addr, one->ai_addrlen);
        snprintf(posix->problem, sizeof posix->problem, "%s", up ? "" : strerror(errno));
        if (!up) close_socket(context);
    }
    freeaddrinfo(found);
    if (!up) return false;
    setsockopt(posix->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* else an answer waits 40 ms */
    fcntl(posix->socket, F_SETFL, fcntl(posix->socket, F_GETFL) | O_NONBLOCK);
    return true;
}

static int read_socket(void *context, uint8_t *bytes, size_t size) {
    posix_port *posix = context;
    if (!size) return 0;
    ssize_t came = recv(posix->socket, bytes, size, 0);
    if (came > 0) return (int)came;
    return came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
}

static bool send_socket(void *context, const uint8_t *bytes, size_t size) {
    posix_port *posix = context;
    uint64_t until = uptime_ms(context) + SEND_MS;
    while (size) {
        ssize_t sent = send(posix->socket, bytes, size, MSG_NOSIGNAL);
        if (sent > 0) {
            bytes += sent;
            size -= (size_t)sent;
        } else if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            return false;
        } else {
            struct pollfd ready = {posix->socket, POLLOUT, 0};
            if (uptime_ms(context) > until || poll(&ready, 1, 100) < 0) return false;
        }
    }
    return true;
}

static bool flash_read(void *context, uint32_t at, void *bytes, size_t size) {
    return pread(((posix_port *)context)->flash, bytes, size, at) == (ssize_t)size;
}

static bool flash_write(void *context, uint32_t at, const void *bytes, size_t size) {
    int file = ((posix_port *)context)->flash;
    return pwrite(file, bytes, size, at) == (ssize_t)size && !fsync(file);
}

static bool flash_erase(void *context, uint32_t area) {
    int file = ((posix_port *)context)->flash;
    uint8_t page[4096];
    memset(page, 0xFF, sizeof page);
    for (uint32_t at = 0; at < AREA_SIZE; at += sizeof page)
        if (pwrite(file, page, sizeof page, area * AREA_SIZE + at) != sizeof page) return false;
    return !fsync(file);
}

bool posix_port_begin(posix_port *posix, const char *host, const char *service, const char *flash_path) {
    static const duly_port port = {
        NULL, open_socket, read_socket, send_socket, close_socket, uptime_ms, time_ms,
        random_bits, flash_read, flash_write, flash_erase, AREAS, AREA_SIZE,
    };
    struct stat now;
    memset(posix, 0, sizeof *posix);
    posix->port = port;
    posix->port.context = posix;
    posix->host = host;
    posix->service = service;
    posix->socket = -1;
    posix->flash = open(flash_path, O_RDWR | O_CREAT, 0600);
    if (posix->flash < 0 || fstat(posix->flash, &now)) return false;
    for (uint32_t area = 0; now.st_size < (off_t)AREAS * AREA_SIZE && area < AREAS; area++)
        if (!flash_erase(posix, area)) return false;
    return true;
}

void posix_port_wait(const posix_port *posix, int milliseconds) {
    struct pollfd news = {posix->socket, POLLIN, 0};
    poll(posix->socket < 0 ? NULL : &news, posix->socket < 0 ? 0 : 1, milliseconds);
}
