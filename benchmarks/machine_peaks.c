/* What the cores of this machine read a second, where each thread adds up its own part of a buffer, and how many products
   they add, where each keeps as many sums in registers as hide how long one takes. */
#include <pthread.h>
#include <stdlib.h>
#include "../moe_serve/kernels/cpu/vec.h"

enum { MOST = 256, SUMS = 12 };

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

static int64_t in_threads(void *(*run)(void *), Part *parts, int64_t threads)
{
    pthread_t ids[MOST];
    int64_t failed = 0;
    for (int64_t i = 0; i < threads; i++) failed |= pthread_create(&ids[i], 0, run, &parts[i]);
    for (int64_t i = 0; i < threads && !failed; i++) pthread_join(ids[i], 0);
    return failed;
}

/* reads n floats with this many threads, at most 256; 0 when all could be started */
int64_t read_all(int64_t address, int64_t n, int64_t threads)
{
    Part parts[MOST];
    int64_t each = n / threads / 64 * 64;
    for (int64_t i = 0; i < threads; i++) parts[i] = (Part){(const float *)address + i * each, each, 0};
    return in_threads(read_part, parts, threads);
}

static void *add_products(void *about)
{
    Part *p = about;
    vf sum[SUMS] = {}, a = splat(0.5f), b = splat(p->x[0]);
    for (int64_t i = 0; i < p->n; i++)
        UNROLL for (int j = 0; j < SUMS; j++) add_product(&sum[j], a, b);
    UNROLL for (int j = 0; j < SUMS; j++) p->sum += sum[j][0];
    return 0;
}

/* adds n times as many products as registers of sums hold, in each of this many threads; 0 when all could be started */
int64_t multiply_all(int64_t one_float, int64_t n, int64_t threads)
{
    Part parts[MOST];
    for (int64_t i = 0; i < threads; i++) parts[i] = (Part){(const float *)one_float, n, 0};
    return in_threads(add_products, parts, threads);
}

/* products that one of n adds */
int64_t products_at_once(void) { return SUMS * VL; }
