/* What the cores of this machine read a second: each thread adds up its own part of a buffer. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef struct {
    const float *x;
    int64_t n;
    float sum;
} Part;

static void *read_part(void *about)
{
    Part *p = about;
    v16 sum[4] = {};
    for (int64_t i = 0; i + 64 <= p->n; i += 64)
        for (int j = 0; j < 4; j++) {
            __builtin_prefetch(p->x + i + 1024 + 16 * j);
            sum[j] += *(const v16 *)(p->x + i + 16 * j);
        }
    p->sum = (sum[0] + sum[1] + sum[2] + sum[3])[0];
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
