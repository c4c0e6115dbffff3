/* Copies of rows: through the caches or past them, to one address or to several. */

#pragma once
#include <immintrin.h>
#include <string.h>
#include "row_copy.h"

/* The first CACHED_BYTES of an area are written through the caches, where the next reader finds them. The rest is
   streamed past the caches, which does not read what it overwrites. Each path has a limit of its own, so both together
   are faster than either. */
#ifdef __AVX512F__
#define WORDS 64
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, words) _mm512_storeu_si512((void *)(to), words)
#define STREAM(to, words) _mm512_stream_si512((void *)(to), words)
typedef __m512i Words;
#elif defined(__AVX__)
#define WORDS 32
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, words) _mm256_storeu_si256((__m256i *)(to), words)
#define STREAM(to, words) _mm256_stream_si256((__m256i *)(to), words)
typedef __m256i Words;
#else
#define WORDS 16
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define STORE(to, words) _mm_storeu_si128((__m128i *)(to), words)
#define STREAM(to, words) _mm_stream_si128((__m128i *)(to), words)
typedef __m128i Words;
#endif

enum { LINE = 64, AHEAD = 1024 };

/* Copies through the caches and asks for lines before it writes them. For rows of this size memcpy is one string
   instruction, which takes longer on Xeons. */
static void copy_row(uint8_t *to, const uint8_t *from, i64 size)
{
    i64 whole = size - size % LINE;
    for (i64 i = 0; i < whole; i += LINE) {
        __builtin_prefetch(to + i + AHEAD, 1);
        for (i64 j = i; j < i + LINE; j += WORDS)
            STORE(to + j, LOAD(from + j));
    }
    memcpy(to + whole, from + whole, size - whole);
}

/* Writes one row to up to two cached and two streamed addresses; callers pass constant numbers, so loops unroll. */
static inline __attribute__((always_inline)) void spread(uint8_t *const *cached, int num_cached, uint8_t *const *streamed,
                                                         int num_streamed, const uint8_t *from, i64 size)
{
    for (i64 i = 0; i < size; i += WORDS) {
        Words words = LOAD(from + i);
        for (int n = 0; n < num_cached && i % LINE == 0; n++)
            __builtin_prefetch(cached[n] + i + AHEAD, 1);
        for (int n = 0; n < num_cached; n++)
            STORE(cached[n] + i, words);
        for (int n = 0; n < num_streamed; n++)
            STREAM(streamed[n] + i, words);
    }
}

/* Writes one row to several addresses of an area while it is in registers. */
static void spread_row(uint8_t **to, i64 num, const uint8_t *from, i64 size, const uint8_t *area, i64 cached_bytes)
{
    uint8_t *cached[num + 1], *streamed[num + 1], **c = cached, **s = streamed;
    i64 num_cached = 0, num_streamed = 0;
    if (((uintptr_t)area | (uintptr_t)size) % 64 != 0) {
        for (i64 n = 0; n < num; n++)
            copy_row(to[n], from, size);
        return;
    }
    for (i64 n = 0; n < num; n++)
        if (to[n] - area < cached_bytes)
            cached[num_cached++] = to[n];
        else
            streamed[num_streamed++] = to[n];
    while (num_cached > 0 || num_streamed > 0) {
        int of_cached = num_cached < 2 ? num_cached : 2, of_streamed = num_streamed < 2 ? num_streamed : 2;
        switch (3 * of_cached + of_streamed) {
        case 1: spread(c, 0, s, 1, from, size); break;
        case 2: spread(c, 0, s, 2, from, size); break;
        case 3: spread(c, 1, s, 0, from, size); break;
        case 4: spread(c, 1, s, 1, from, size); break;
        case 5: spread(c, 1, s, 2, from, size); break;
        case 6: spread(c, 2, s, 0, from, size); break;
        case 7: spread(c, 2, s, 1, from, size); break;
        case 8: spread(c, 2, s, 2, from, size); break;
        }
        c += of_cached, num_cached -= of_cached;
        s += of_streamed, num_streamed -= of_streamed;
    }
}
