/* What the cores of this machine read a second: each thread adds up its own part of a buffer. */
#include <pthread.h>
#include <stdlib.h>
#include "../moe_serve/kernels/cpu/vec.h"

typedef struct {
    const float *x;
    int64_t n;
    float sum;
} Part;

static void *read_part(void *about)
{
    Part *p = about;
    vf sum[64 / VL] = {};
    for (int64_t i = 0; i + 64 <= p->n; i += 64)
        UNROLL for (int j = 0; j < 64 / VL; j++) {
            if (j % SPAN == 0) __builtin_prefetch(p->x + i + 1024 + VL * j);
            sum[j] += *(const vf *)(p->x + i + VL * j);
        }
    for (int j = 0; j < 64 / VL; j++) p->sum += sum[j][0];
    return 0;
}

/* reads n floats with this many threads, at most 256; 0 when all could be started */
int64_t read_all(int64_t address, int64_t n, int64_t threads)
{
    Part parts[256];
    pthread_t ids[256];
    int64_t failed = 0, each = n / threads / 64 * 64;
    for (int64_t i = 0; i < threads; i++) {
        parts[i] = (Part){(const float *)address + i * each, each, 0};
        failed |= pthread_create(&ids[i], 0, read_part, &parts[i]);
    }
    for (int64_t i = 0; i < threads && !failed; i++) pthread_join(ids[i], 0);
    return failed;
}
