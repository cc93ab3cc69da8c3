/* The floor of publishing: acknowledged messages with ids over one socket, and nothing else.
 *
 * publish PORT SUBJECT COUNT SIZE WINDOW HEADERS: keeps up to WINDOW messages in flight, reads every PubAck, and prints the
 * seconds, the CPU seconds and how many were acknowledged. HEADERS is text that follows the id of each message, such as
 * "Airflow-Task: x\r\n", with the line breaks. Protocol: "NATS Client Protocol" in the NATS documentation.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static char in[1 << 20];
static size_t filled;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void write_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t sent = write(fd, data, size);
        if (sent <= 0) fail("write");
        data += sent;
        size -= (size_t)sent;
    }
}

static void read_some(int fd) {
    ssize_t got = read(fd, in + filled, sizeof in - filled);
    if (got <= 0) fail("read");
    filled += (size_t)got;
}

/* Handles the whole frames that have arrived, and returns how many of them are PubAcks without an error. */
static long take_answers(int fd) {
    size_t position = 0;
    long acknowledged = 0;
    for (;;) {
        char *line = in + position;
        char *end = memchr(line, '\n', filled - position);
        if (!end) break;
        size_t next = (size_t)(end - in) + 1;
        if (memcmp(line, "MSG ", 4) == 0) {
            char *digits = end - 1;
            while (digits[-1] != ' ') digits--;
            size_t size = (size_t)atol(digits);
            if (next + size + 2 > filled) break;
            if (memcmp(in + next, "{\"stream\"", 9) == 0) acknowledged++;
            next += size + 2;
        } else if (memcmp(line, "PING", 4) == 0) {
            write_all(fd, "PONG\r\n", 6);
        } else if (memcmp(line, "-ERR", 4) == 0 || memcmp(line, "HMSG", 4) == 0) {
            fwrite(line, 1, (size_t)(end - line), stderr);
            exit(1);
        }
        position = next;
    }
    memmove(in, in + position, filled - position);
    filled -= position;
    return acknowledged;
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    const char *subject = argv[2], *rest = argv[6];
    long count = atol(argv[3]), size = atol(argv[4]), window = atol(argv[5]);
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const char *hello = "CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\nSUB _INBOX.floor.* 1\r\n";
    write_all(fd, hello, strlen(hello));
    char *body = malloc((size_t)size), *chunk = malloc((size_t)(window / 4 + 1) * (size_t)(size + 768));
    if (strlen(rest) > 400) return 2;
    memset(body, 'x', (size_t)size);
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    long sent = 0, acknowledged = 0;
    while (acknowledged < count) {
        while (sent < count && sent - acknowledged <= window - window / 4) {
            size_t length = 0;
            for (long number = 0; number < window / 4 && sent < count; number++, sent++) {
                char headers[512];
                int block = snprintf(headers, sizeof headers, "NATS/1.0\r\nNats-Msg-Id: %022ld\r\n%s\r\n", sent, rest);
                length += (size_t)sprintf(chunk + length, "HPUB %s _INBOX.floor.%ld %d %ld\r\n%s", subject, sent, block,
                                          block + size, headers);
                memcpy(chunk + length, body, (size_t)size);
                length += (size_t)size;
                memcpy(chunk + length, "\r\n", 2);
                length += 2;
            }
            write_all(fd, chunk, length);
        }
        read_some(fd);
        acknowledged += take_answers(fd);
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double seconds = (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) / 1e9;
    double cpu = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    printf("{\"seconds\": %.6f, \"cpu\": %.6f, \"count\": %ld}\n", seconds, cpu, acknowledged);
    return 0;
}
