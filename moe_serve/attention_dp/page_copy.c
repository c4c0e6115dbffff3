/* Copies pages between a pool of the KV cache, layer by layer, and records of whole pages, with their CRC-32C. */
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

#ifdef __SSE4_2__
#include <nmmintrin.h>
static uint64_t of_word(uint64_t sum, uint64_t word) { return _mm_crc32_u64(sum, word); }
static uint64_t of_byte(uint64_t sum, uint8_t byte) { return _mm_crc32_u8((uint32_t)sum, byte); }
#else
static uint64_t of_byte(uint64_t sum, uint8_t byte)
{
    sum ^= byte;
    for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78u : 0);
    return sum;
}
static uint64_t of_word(uint64_t sum, uint64_t word)
{
    for (int byte = 0; byte < 8; byte++) sum = of_byte(sum, (uint8_t)(word >> 8 * byte));
    return sum;
}
#endif

/* Copies n bytes and returns the sum over what is stored, so that nobody can change it between check and use. */
static uint64_t copy(uint8_t *to, const uint8_t *from, i64 n, uint64_t sum)
{
    i64 at = 0;
    for (; at + 8 <= n; at += 8) {
        uint64_t word;
        memcpy(&word, from + at, 8);
        memcpy(to + at, &word, 8);
        sum = of_word(sum, word);
    }
    for (; at < n; at++) {
        uint8_t byte = ((const volatile uint8_t *)from)[at];
        to[at] = byte;
        sum = of_byte(sum, byte);
    }
    return sum;
}

/* heads: of each page, head_bytes each, which its sum covers too;  pages: addresses;  blocks: of the pool
 * parts, part_bytes: of the pool, the address and the bytes of a block in each layer
 * into_pool: the pages go there, else from there;  sums: the CRC-32C of each page, with its head */
i64 copy_pages(i64 num_pages, i64 heads, i64 head_bytes, i64 pages, i64 blocks, i64 num_parts, i64 parts,
               i64 part_bytes, i64 into_pool, i64 sums)
{
    for (i64 page = 0; page < num_pages; page++) {
        uint8_t *at = (uint8_t *)((i64 *)pages)[page];
        const uint8_t *head = (const uint8_t *)heads + page * head_bytes;
        uint64_t sum = 0xffffffffu;
        for (i64 byte = 0; byte < head_bytes; byte++) sum = of_byte(sum, head[byte]);
        for (i64 part = 0; part < num_parts; part++) {
            i64 size = ((i64 *)part_bytes)[part];
            uint8_t *in_pool = (uint8_t *)((i64 *)parts)[part] + ((i64 *)blocks)[page] * size;
            sum = into_pool ? copy(in_pool, at, size, sum) : copy(at, in_pool, size, sum);
            at += size;
        }
        ((i64 *)sums)[page] = (i64)(sum ^ 0xffffffffu);
    }
    return 0;
}

/* Returns the CRC-32C of a record without its checksum and its page, which lie anywhere. */
i64 sum_page(i64 head, i64 head_bytes, i64 page, i64 page_bytes)
{
    const uint8_t *bytes = (const uint8_t *)page;
    uint64_t sum = 0xffffffffu;
    for (i64 byte = 0; byte < head_bytes; byte++) sum = of_byte(sum, ((const uint8_t *)head)[byte]);
    i64 at = 0;
    for (; at + 8 <= page_bytes; at += 8) {
        uint64_t word;
        memcpy(&word, bytes + at, 8);
        sum = of_word(sum, word);
    }
    for (; at < page_bytes; at++) sum = of_byte(sum, bytes[at]);
    return (i64)(sum ^ 0xffffffffu);
}
