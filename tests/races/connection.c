/* Two ends of a connection between hosts in one process, each with its thread, for test_races.py: calls with flags and
   acknowledgements, words told at any time, and epochs that end with the connection in the middle of a call. Returns 0
   where whatever a flag announced is there. */
#include <stdio.h>

#include "link.c"

enum { EPOCHS = 6, CALLS = 60, SIZE = 40000, FLAGS = 2 * SIZE, ACK = FLAGS + 16, TOLD = FLAGS + 64, BYTES = FLAGS + 128 };
static _Alignas(64) uint8_t memory[2][2][BYTES]; /* of each end: the region of each rank */
static Link *links[2];
static int is_over, wrong, sockets[EPOCHS][2];
static pthread_barrier_t both;

static i64 flag_at(i64 end, i64 rank, i64 offset)
{
    return __atomic_load_n((i64 *)(memory[end][rank] + offset), __ATOMIC_ACQUIRE);
}

/* A heart beats on a thread of its own, in all epochs. */
static void *tell(void *number)
{
    i64 end = (i64)number, word[2] = {0};
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        word[0]++;
        link_tell(links[end], 1 - end, 0, 1ull << end, TOLD + 16 * end, word, sizeof word);
        usleep(200);
    }
    return NULL;
}

/* Exchanges calls with the other end until it has made all, or the connection has ended. */
static void exchange(i64 end, i64 epoch)
{
    i64 other = 1 - end;
    uint8_t *data = malloc(SIZE);
    for (i64 call = 1; call <= CALLS; call++) {
        i64 flag = epoch << 40 | call, size = call % 3 ? call : SIZE, buffer = call % 2;
        while (call > 2 && flag_at(end, end, ACK) < (epoch << 40 | (call - 2)) && !link_broken(links[end], other))
            link_poll(links[end]);
        if (epoch % 2 && call == CALLS / 2 + end)
            shutdown(links[end]->sockets[other], SHUT_RDWR); /* the cable is cut */
        memset(data, call + end, size);
        link_write(links[end], other, 0, 1ull << other, buffer * SIZE, data, size, FLAGS + 8 * buffer, flag);
        while (flag_at(end, end, FLAGS + 8 * buffer) != flag && !link_broken(links[end], other))
            link_poll(links[end]);
        if (link_broken(links[end], other))
            break;
        for (i64 i = 0; i < size; i++)
            if (memory[end][end][buffer * SIZE + i] != (uint8_t)(call + other))
                __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
        link_later(links[end], other, 0, 1ull << other, ACK, flag);
    }
    while (link_unsent(links[end], link_posted(links[end])) && !link_broken(links[end], other))
        link_poll(links[end]);
    free(data);
}

static void *play(void *number)
{
    i64 end = (i64)number;
    for (i64 epoch = 0; epoch < EPOCHS; epoch++) {
        link_void(links[end], epoch);
        pthread_barrier_wait(&both); /* nobody takes in frames of an older epoch */
        link_attach(links[end], 1 - end, sockets[epoch][end]);
        link_begin_epoch(links[end], epoch);
        pthread_barrier_wait(&both);
        exchange(end, epoch);
        pthread_barrier_wait(&both);
        if (link_resent(links[end], 1 - end))
            __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

int main(void)
{
    pthread_t ends[2], hearts[2];
    Guard guards[2] = {{0}};
    pthread_barrier_init(&both, NULL, 2);
    for (i64 epoch = 0; epoch < EPOCHS; epoch++)
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[epoch]))
            return 1;
    for (i64 end = 0; end < 2; end++) {
        links[end] = link_new();
        for (i64 rank = 0; rank < 2; rank++)
            link_region(links[end], 0, rank, memory[end][rank], BYTES);
        link_guard(links[end], guards + end);
        if (link_start(links[end]))
            return 1;
    }
    for (i64 end = 0; end < 2; end++) {
        pthread_create(&hearts[end], NULL, tell, (void *)end);
        pthread_create(&ends[end], NULL, play, (void *)end);
    }
    for (i64 end = 0; end < 2; end++)
        pthread_join(ends[end], NULL);
    while (!link_fence(guards, EPOCHS)) /* a neighbour raises the guard while the threads go on */
        ;
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (i64 end = 0; end < 2; end++) {
        pthread_join(hearts[end], NULL);
        link_free(links[end]);
    }
    if (wrong)
        puts("data are wrong");
    return wrong;
}
