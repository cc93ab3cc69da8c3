/* The floor of a worker: pulls jobs, stores a completion for each, then acknowledges it, with no checks.
 *
 * worker PORT STREAM CONSUMER JOBS confirmed|plain [UNSETTLED]
 *
 * "confirmed" stores completions with the headers and ids of a worker and waits for each confirmation; "plain" only
 * acknowledges. With UNSETTLED at most so many jobs are requested or not settled. Prints the seconds from the first pull request to the last confirmation,
 * and the CPU seconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { INPUT = 1 << 20, OUTPUT = 4 << 20, REPLY = 200 };

static char input[INPUT + 1], output[OUTPUT];
static size_t filled, waiting;
static int server;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void flush_output(void) {
    for (size_t sent = 0; sent < waiting;) {
        ssize_t n = send(server, output + sent, waiting - sent, 0);
        if (n <= 0) fail("send");
        sent += n;
    }
    waiting = 0;
}

static void receive(void) {
    ssize_t n = recv(server, input + filled, INPUT - filled, 0);
    if (n <= 0) fail("recv");
    filled += n;
    input[filled] = 0;
}

int main(int argc, char **argv) {
    if (argc != 6 && argc != 7) return 2;
    const char *stream = argv[2], *consumer = argv[3];
    const long jobs = atol(argv[4]);
    const int confirmed = !strcmp(argv[5], "confirmed");
    const long unsettled = argc > 6 ? atol(argv[6]) : 0, batch = unsettled ? unsettled / 4 : 1000;
    char(*replies)[REPLY] = calloc(jobs + 1, REPLY);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int on = 1;
    server = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(server, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    waiting = sprintf(output, "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true,\"no_responders\":true}\r\n"
                              "SUB _INBOX.floor.> 1\r\n");
    double began = now();
    long pulled = 0, requested = 0, done = 0;
    while (done < jobs) {
        while (requested < jobs &&
               (unsettled ? requested - done + batch <= unsettled : requested - pulled < 2 * batch - batch / 2)) {
            char body[80];
            int bytes = sprintf(body, "{\"batch\": %ld, \"expires\": 30000000000}", batch);
            waiting += sprintf(output + waiting, "PUB $JS.API.CONSUMER.MSG.NEXT.%s.%s _INBOX.floor.p %d\r\n%s\r\n", stream,
                               consumer, bytes, body);
            requested += batch;
        }
        flush_output();
        receive();
        char *at = input, *end = input + filled;
        while (at < end) {
            char *line = memchr(at, '\n', end - at);
            if (!line) break;
            if (strncmp(at, "MSG ", 4) && strncmp(at, "HMSG ", 5)) {
                if (!strncmp(at, "PING", 4)) waiting += sprintf(output + waiting, "PONG\r\n");
                if (!strncmp(at, "-ERR", 4)) { fprintf(stderr, "%.80s\n", at); return 1; }
                at = line + 1;
                continue;
            }
            /* The size is the last field. */
            char *field = line - 1;
            while (field[-1] != ' ') field--;
            long size = atol(field);
            if (line + 1 + size + 2 > end) break;
            char *subject = strchr(at, ' ') + 1;
            if (!strncmp(subject, "_INBOX.floor.c", 14)) {
                long number = atol(subject + 14);
                if (!memmem(line, size + 1, "\"seq\":", 6)) { fprintf(stderr, "%.200s\n", line + 1); return 1; }
                waiting += sprintf(output + waiting, "PUB %s _INBOX.floor.a 4\r\n+ACK\r\n", replies[number]);
            } else if (!strncmp(subject, "_INBOX.floor.a", 14)) {
                done++;
            } else if (strncmp(subject, "_INBOX.floor.p", 14)) {
                char *reply = strstr(at, " $JS.ACK.") + 1;
                size_t length = strchr(reply, ' ') - reply;
                if (length >= REPLY || ++pulled > jobs) return 1;
                if (!confirmed) {
                    waiting += sprintf(output + waiting, "PUB %.*s 4\r\n+ACK\r\n", (int)length, reply);
                    done++;
                } else {
                    memcpy(replies[pulled], reply, length);
                    replies[pulled][length] = 0;
                    char body[400], id[100];
                    char *stored = reply + length;
                    for (int dots = 0; dots < 2;)
                        if (*--stored == '.') dots++;
                    int ids = sprintf(id, "NATS/1.0\r\nNats-Msg-Id: done:%s:%ld:%.10s.%.6s\r\n\r\n", stream, pulled,
                                      stored + 1, stored + 11);
                    int bytes = sprintf(body,
                                        "{\"id\":\"job-%ld\",\"timestamp\":\"2026-11-22T20:00:00.000000Z\",\"stream\":\"%s\","
                                        "\"consumer\":\"%s\",\"stream_seq\":%ld,\"deliveries\":1,"
                                        "\"type\":\"io.airflow.jetstream.v1.completion\",\"job_id\":\"job-%ld\","
                                        "\"worker\":\"floor\"}",
                                        pulled, stream, consumer, pulled, pulled);
                    waiting += sprintf(output + waiting, "HPUB completed.%s.%s.%ld _INBOX.floor.c%ld %d %d\r\n%s%s\r\n",
                                       stream, consumer, pulled, pulled, ids, ids + bytes, id, body);
                }
            }
            at = line + 1 + size + 2;
            if (waiting > OUTPUT - 4096) flush_output();
        }
        filled = end - at;
        memmove(input, at, filled);
    }
    if (!confirmed) {
        waiting += sprintf(output + waiting, "PING\r\n");
        flush_output();
        for (input[filled] = 0; !strstr(input, "PONG\r\n"); filled = 0) { filled = 0; receive(); }
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("%.6f %.6f\n", now() - began,
           used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    return 0;
}
