/* The slab protocol between GPUs (moe_serve/dispatch/gpu: send_triton.py, receive_triton.py), put by put, over OpenSHMEM.

   A loop here is a launch there, and goes through its programs from the last one to the first, since they run in any order.
   A put with signal is a put, a fence and an atomic store of the flag: OpenSHMEM 1.4 has no other. Rows are float32. The
   calls PROGRAM, the region's division and the sizes come from the code: test_openshmem.py writes them above this text.

   The last rank sleeps for PAUSE_MS between rows and flags, and for AHEAD_MS before it first receives, unless a peer is a
   round ahead by then: so whoever may come too early does. There is no deadline here: a flag of a later round ends all
   ranks, and so does a row for another slot.

   Mistakes, each of which must be seen: FLAG_FIRST a flag before its row; NO_DONE a queue is used again without asking;
   ONE_QUEUE both handles have the same queue. */

#include <math.h>
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef ONE_QUEUE
#define QUEUE(n) 0
#define ROUND(n) (n)
#else
#define QUEUE(n) (((n) - 1) % QUEUES)
#define ROUND(n) (((n) - 1) / QUEUES + 1)
#endif
#define CAPACITY (RANKS * MOST_TOKENS)

typedef struct { /* what a rank gives to a call, and gets of it */
    long num_tokens, ids[MOST_TOKENS][TOPK];
    float x[MOST_TOKENS][HIDDEN], weights[MOST_TOKENS][TOPK];
} Input;
typedef struct {
    long rows_per_slot[SLOTS], origin[SLOTS][CAPACITY];
    float slab[SLOTS][CAPACITY][HIDDEN], out[MOST_TOKENS][HIDDEN];
} Output;

static Input inputs[CALLS];
static Output outputs[CALLS];
static char *region;
static int me;

static char *at(int n, long offset) { return region + QUEUE(n) * QUEUE_BYTES + offset; }

static void end(const char *found, int n)
{
    printf("rank %d finds %s in call %d\n", me, found, n);
    fflush(stdout);
    shmem_global_exit(3);
}

static void put(int pe, int n, long to, long from, long size)
{
    shmem_putmem(at(n, to), at(n, from), size, pe);
}

static void raise_flag(int pe, int n, long flag, long value)
{
    shmem_fence();
    shmem_long_atomic_set((long *)at(n, flag), value, pe);
}

/* Waits until a flag holds this round, or a count of it. */
static long wait_for(int n, long flag, int shift)
{
    long *word = (long *)at(n, flag), round = ROUND(n);
    shmem_long_wait_until(word, SHMEM_CMP_GE, round << shift);
    long seen = shmem_long_atomic_fetch(word, me);
    if (seen >> shift != round)
        end("a later round", n);
    return seen;
}

/* Returns how many of the first tokens name a slot. */
static long rows_before(const Input *in, long slot, long num_tokens)
{
    long found = 0;
    for (long token = 0; token < num_tokens; token++) {
        int names = 0;
        for (int k = 0; k < TOPK; k++)
            names |= in->ids[token][k] == slot;
        found += names;
    }
    return found;
}

static int first_k(const long *ids, int k)
{
    int first = 0;
    while (ids[first] != ids[k])
        first++;
    return first;
}

static void dispatch(int n)
{
    const Input *in = inputs + n - 1;
    for (long slot = RANKS * SLOTS - 1; slot >= 0; slot--)
        raise_flag(slot / SLOTS, n, COUNTS_AT + (slot % SLOTS * RANKS + me) * 8,
                   (long)ROUND(n) << 32 | rows_before(in, slot, in->num_tokens));
    for (int pass = 0; pass < 2; pass++) { /* rows, then their flags */
        for (long token = in->num_tokens - 1; token >= 0; token--) {
            const long *ids = in->ids[token];
            long from = STAGED_AT + token * ROW_BYTES;
            int *header = (int *)at(n, from);
            header[0] = token;
            for (int place = 1; place < HEADER_INTS; place++)
                header[place] = place <= TOPK ? ids[place - 1] : -1;
            memcpy(header + HEADER_INTS, in->x[token], sizeof in->x[token]);
            for (int k = 0; k < TOPK; k++) {
                if (ids[k] < 0 || first_k(ids, k) != k)
                    continue;
                long to = (ids[k] % SLOTS * RANKS + me) * MOST_TOKENS + rows_before(in, ids[k], token);
#ifdef FLAG_FIRST
                if (pass)
#else
                if (!pass)
#endif
                    put(ids[k] / SLOTS, n, ROWS_AT + to * ROW_BYTES, from, ROW_BYTES);
                else
                    raise_flag(ids[k] / SLOTS, n, ARRIVED_AT + to * 8, ROUND(n));
            }
        }
        if (me == RANKS - 1 && !pass)
            usleep(PAUSE_MS * 1000);
    }
}

static void receive(int n)
{
    Output *out = outputs + n - 1;
    if (me == RANKS - 1 && n == 1)
        for (int i = 0; i < AHEAD_MS && shmem_long_atomic_fetch((long *)at(n, COUNTS_AT), me) >> 32 == ROUND(n); i++)
            usleep(1000);
    for (long slot = SLOTS - 1; slot >= 0; slot--) {
        long first = 0;
        for (long source = 0; source < RANKS; source++) {
            long count = wait_for(n, COUNTS_AT + (slot * RANKS + source) * 8, 32) & 0xffffffff;
            for (long row = 0; row < count; row++) {
                long from = (slot * RANKS + source) * MOST_TOKENS + row;
                wait_for(n, ARRIVED_AT + from * 8, 0);
                const int *header = (int *)at(n, ROWS_AT + from * ROW_BYTES);
                int k = 0;
                while (k < TOPK && header[1 + k] != me * SLOTS + slot)
                    k++;
                if (k == TOPK || header[0] < 0 || header[0] >= MOST_TOKENS)
                    end("a row that is not for this slot", n);
                out->origin[slot][first + row] = source << 32 | (header[0] * TOPK + k);
                memcpy(out->slab[slot][first + row], header + HEADER_INTS, HIDDEN * sizeof(float));
            }
            first += count;
        }
        out->rows_per_slot[slot] = first;
    }
}

/* Each slot multiplies by its own number, so a result from the wrong expert shows. */
static void answer(int n)
{
    const Output *out = outputs + n - 1;
    for (int pe = RANKS - 1; pe >= 0; pe--)
        raise_flag(pe, n, DONE_AT + me * 8, ROUND(n));
    for (int pass = 0; pass < 2; pass++) {
        for (long slot = SLOTS - 1; slot >= 0; slot--)
            for (long row = out->rows_per_slot[slot] - 1; row >= 0; row--) {
                long source = out->origin[slot][row] >> 32, entry = out->origin[slot][row] & 0xffffffff;
                long from = RESULT_STAGED_AT + (slot * CAPACITY + row) * RESULT_ROW_BYTES;
                float *result = (float *)at(n, from);
                for (int channel = 0; channel < HIDDEN; channel++)
                    result[channel] = out->slab[slot][row][channel] * (me * SLOTS + slot + 1);
#ifdef FLAG_FIRST
                if (pass)
#else
                if (!pass)
#endif
                    put(source, n, RESULT_ROWS_AT + entry * RESULT_ROW_BYTES, from, RESULT_ROW_BYTES);
                else
                    raise_flag(source, n, RESULT_ARRIVED_AT + entry * 8, ROUND(n));
            }
        if (me == RANKS - 1 && !pass)
            usleep(PAUSE_MS * 1000);
    }
}

static void add(int n)
{
    const Input *in = inputs + n - 1;
    for (long token = in->num_tokens - 1; token >= 0; token--) {
        float *total = outputs[n - 1].out[token];
        for (int k = 0; k < TOPK; k++) {
            if (in->ids[token][k] < 0)
                continue;
            long entry = token * TOPK + first_k(in->ids[token], k);
            wait_for(n, RESULT_ARRIVED_AT + entry * 8, 0);
            const float *result = (float *)at(n, RESULT_ROWS_AT + entry * RESULT_ROW_BYTES);
            for (int channel = 0; channel < HIDDEN; channel++)
                total[channel] = fmaf(in->weights[token][k], result[channel], total[channel]);
        }
    }
#ifndef NO_DONE
    for (int source = RANKS - 1; source >= 0; source--)
        wait_for(n, DONE_AT + source * 8, 0);
#endif
}

static void save(const void *data, size_t size)
{
    char name[16];
    snprintf(name, sizeof name, "got%d", me);
    FILE *file = fopen(name, "ab");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file))
        shmem_global_exit(4);
}

int main(void)
{
    char name[16];
    shmem_init();
    me = shmem_my_pe();
    snprintf(name, sizeof name, "given%d", me);
    FILE *file = fopen(name, "rb");
    if (shmem_n_pes() != RANKS || !file || fread(inputs, sizeof inputs, 1, file) != 1)
        shmem_global_exit(4);
    region = shmem_align(128, QUEUES * QUEUE_BYTES);
    memset(region, 0, QUEUES * QUEUE_BYTES);
    shmem_barrier_all();
    PROGRAM;
    shmem_barrier_all(); /* a peer's last flags are here */
    save(outputs, sizeof outputs);
    save(region, QUEUES * QUEUE_BYTES);
    shmem_barrier_all();
    shmem_global_exit(0); /* OpenMPI 4.1.4 as Debian 12 has it dies in shmem_finalize, also of an empty program */
}
