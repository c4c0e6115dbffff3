/* Bytes to another host and back, by one plain TCP stream, by our link, or by MPI's one-sided calls (built with -DMPI):
   hosts_contestants.py builds and runs it.

       hosts_ping plain|link s|c ADDRESS PORT BYTES TIMES        hosts_ping BYTES TIMES

   One end writes data and a flag behind them; the other waits for the flag and answers alike. Both poll without a pause.
   The client, or rank 1, prints the round trips in nanoseconds. */

#ifdef MPI
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
typedef int64_t i64;
static i64 now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
#else
#include "../../moe_serve/dispatch/hosts/link.c"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#endif

enum { SIZE = 1 << 22, DATA_AT = 4096, SMALL = 256 };

static i64 size, times;

/* plain: the socket;  link: the link and its region of each rank */
static void (*send_all)(i64 round);
static void (*wait_for)(i64 round);

static void ping(int answers)
{
    for (i64 round = 1; round <= times; round++) {
        i64 started_ns = now_ns();
        if (answers)
            wait_for(round);
        send_all(round);
        if (!answers) {
            wait_for(round);
            printf("%ld\n", (long)(now_ns() - started_ns));
        }
    }
}

#ifdef MPI
static MPI_Win window;
static uint8_t *region, *data;
static int peer;

static void mpi_send(i64 round)
{
    if (size > 8) {
        MPI_Put(data, size, MPI_BYTE, peer, DATA_AT, size, MPI_BYTE, window);
        MPI_Win_flush(peer, window); /* puts are not ordered otherwise */
    }
    MPI_Put(&round, 1, MPI_INT64_T, peer, 0, 1, MPI_INT64_T, window);
    MPI_Win_flush(peer, window);
}

static void mpi_wait(i64 round)
{
    int flag;
    while (*(volatile i64 *)region < round) {
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
        MPI_Win_sync(window);
    }
}

int main(int count, char **words)
{
    int rank;
    (void)count;
    size = atol(words[1]), times = atol(words[2]);
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    peer = 1 - rank;
    data = calloc(1, SIZE);
    MPI_Win_allocate(SIZE, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &region, &window);
    memset(region, 0, SIZE);
    MPI_Win_lock_all(0, window);
    MPI_Barrier(MPI_COMM_WORLD);
    send_all = mpi_send, wait_for = mpi_wait;
    ping(!rank);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    return MPI_Finalize();
}
#else
static int fd;
static uint8_t *data;
static Link *ours;
static uint8_t *regions[2];
static i64 self, facts[FACTS + 2 * SLICE_WORDS], block[16], zero[8];

static void plain_send(i64 round)
{
    (void)round;
    for (i64 done = 0; done < size;) {
        ssize_t part = send(fd, data + done, size - done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (part > 0)
            done += part;
        else if (errno != EAGAIN)
            exit(1);
    }
}

static void plain_wait(i64 round)
{
    (void)round;
    for (i64 done = 0; done < size;) {
        ssize_t part = recv(fd, data + done, size - done, MSG_DONTWAIT);
        if (part > 0)
            done += part;
        else if (!part || errno != EAGAIN)
            exit(1);
    }
}

/* Small data are copied, as counts and flags are; rows go from where they are, as results do. */
static void link_send(i64 round)
{
    i64 peer = 1 - self;
    if (size <= SMALL)
        link_write(ours, peer, 0, 1 << peer, DATA_AT, data, size, 0, round);
    else
        link_results(ours, peer, 0, peer, facts, 0, 0, 1, block, 0, round);
}

static void link_wait(i64 round)
{
    while (__atomic_load_n((i64 *)regions[self], __ATOMIC_ACQUIRE) < round)
        link_poll(ours);
}

static void join(int serves, const char *host, int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    inet_pton(AF_INET, host, &address.sin_addr);
    if (serves) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (void *)&address, sizeof address) || listen(fd, 1))
            exit(1);
        fd = accept(fd, NULL, NULL);
    } else {
        i64 until_ns = now_ns() + 5000000000LL;
        while (connect(fd, (void *)&address, sizeof address)) {
            if (now_ns() > until_ns)
                exit(1);
            close(fd);
            usleep(10000);
            fd = socket(AF_INET, SOCK_STREAM, 0);
        }
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

int main(int count, char **words)
{
    (void)count;
    int serves = *words[2] == 's';
    join(serves, words[3], atoi(words[4]));
    size = atol(words[5]), times = atol(words[6]), self = !serves;
    data = calloc(1, SIZE);
    send_all = plain_send, wait_for = plain_wait;
    if (!strcmp(words[1], "link")) {
        ours = link_new();
        for (i64 rank = 0; rank < 2; rank++) {
            regions[rank] = calloc(1, SIZE);
            link_region(ours, 0, rank, regions[rank], SIZE);
            ((i64 *)facts)[FACTS + rank * SLICE_WORDS + SEND_BUFFER] = (i64)(regions[rank] + DATA_AT);
            ((i64 *)facts)[FACTS + rank * SLICE_WORDS + OUT_STARTS] = (i64)zero;
        }
        facts[RANK] = self, facts[NUM_RANKS] = 2, facts[SLOTS] = 1, facts[RESULT_ROW_BYTES] = size;
        facts[FACTS + (1 - self) * SLICE_WORDS + OUT_STARTS] = (i64)(regions[1 - self] + 64);
        exchange_at(facts, block, 0, 1).arrived[1 - self] = 1;
        fcntl(fd, F_SETFL, O_NONBLOCK);
        link_attach(ours, 1 - self, fd);
        link_start(ours);
        send_all = link_send, wait_for = link_wait;
    }
    ping(serves);
    while (ours && link_unsent(ours, link_posted(ours)))
        ;
    usleep(100000); /* the other end takes in the last answer */
    return 0;
}
#endif
