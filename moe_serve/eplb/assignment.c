/* The assignments and parts of relabel.py, step by step, in C. All numbers are whole, so both forms
   agree. Shape words: n rows and columns; R ranks, K slots per rank, N nodes, E experts. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
enum { RANKS, NODES, INSIDE };

/* memory: 6 n.  price: rows are `stride` apart;  column: [n] out */
static void assign(i64 n, const i64 *price, i64 stride, i64 *column, i64 *memory) {
    i64 *of_row = memory, *of_column = of_row + n, *row = of_column + n, *least = row + n, *before = least + n;
    i64 *reached = before + n;
    for (i64 j = 0; j < n; j++) of_column[j] = 0, row[j] = -1;
    for (i64 i = 0; i < n; i++) { /* rows whose cheapest column is free take it */
        const i64 *mine = price + i * stride;
        of_row[i] = mine[0];
        for (i64 j = 1; j < n; j++) of_row[i] = mine[j] < of_row[i] ? mine[j] : of_row[i];
        column[i] = -1;
        for (i64 j = 0; j < n && column[i] < 0; j++)
            if (row[j] < 0 && mine[j] == of_row[i]) row[j] = i, column[i] = j;
    }
    for (i64 start = 0; start < n; start++) {
        if (column[start] >= 0) continue;
        for (i64 j = 0; j < n; j++) least[j] = INT64_MAX, before[j] = -1, reached[j] = 0;
        i64 i = start, from = -1, end = -1;
        while (end < 0) { /* to the column that is cheapest to reach from `start` over rows that would change theirs */
            i64 next = -1, step = INT64_MAX;
            for (i64 j = 0; j < n; j++) {
                if (reached[j]) continue;
                i64 rest = price[i * stride + j] - of_row[i] - of_column[j];
                if (rest < least[j]) least[j] = rest, before[j] = from;
                if (least[j] < step) step = least[j], next = j;
            }
            if (step) {
                of_row[start] += step;
                for (i64 j = 0; j < n; j++) {
                    if (reached[j]) of_row[row[j]] += step, of_column[j] -= step;
                    else least[j] -= step;
                }
            }
            reached[next] = 1;
            from = next;
            i = row[next];
            if (i < 0) end = next;
        }
        while (end >= 0) {
            i64 previous = before[end];
            row[end] = previous < 0 ? start : row[previous];
            column[row[end]] = end;
            end = previous;
        }
    }
}

/* price: [n][n];  column: [n] out, of each row. Returns 0, or -1 without memory. */
i64 cheapest_columns(i64 n, i64 price, i64 column) {
    i64 *memory = malloc(sizeof(i64) * (size_t)(6 * n + 1));
    if (!memory) return -1;
    assign(n, (const i64 *)price, n, (i64 *)column, memory);
    free(memory);
    return 0;
}

typedef struct { /* laid out as relabel.py writes it */
    i64 num_layers, num_ranks, slots, num_experts, num_nodes, what, forbidden;
    const int32_t *before, *after; /* [L][R][K], -1 = empty */
    const i64 *node_of;            /* [R], ascending */
    i64 *part;                     /* [L][R] out */
} Task;

typedef struct {
    i64 *price, *near, *size, *first, *holder, *total, *inside, *scratch;
    uint8_t *on_node;
} Memory;

static int repeats(const int32_t *rank, i64 slot) {
    for (i64 k = 0; k < slot; k++)
        if (rank[k] == rank[slot]) return 1;
    return 0;
}

static void fill_price(const Task *t, const int32_t *before, const int32_t *after, Memory *m) {
    i64 R = t->num_ranks, K = t->slots, E = t->num_experts, N = t->num_nodes;
    i64 move = 2 * R, off_node = 2 * R * (R * K + 1);
    memset(m->first, 0, sizeof(i64) * (size_t)(E + 2));
    memset(m->on_node, 0, (size_t)(N * E));
    memset(m->near, 0, sizeof(i64) * (size_t)(N * R));
    for (int fill = 0; fill < 2; fill++) { /* the ranks that hold each expert: first how many, then which */
        for (i64 r = 0; r < R; r++)
            for (i64 k = 0; k < K; k++) {
                i64 e = before[r * K + k];
                if (e < 0 || repeats(before + r * K, k)) continue;
                if (fill) m->holder[m->first[e + 1]++] = r, m->on_node[t->node_of[r] * E + e] = 1;
                else m->first[e + 2]++;
            }
        if (!fill) for (i64 e = 0; e < E; e++) m->first[e + 2] += m->first[e + 1];
    }
    for (i64 j = 0; j < R; j++) {
        m->size[j] = 0;
        for (i64 k = 0; k < K; k++) {
            i64 e = after[j * K + k];
            if (e < 0 || repeats(after + j * K, k)) continue;
            m->size[j]++;
            for (i64 n = 0; n < N; n++) m->near[n * R + j] += m->on_node[n * E + e] * off_node;
        }
    }
    for (i64 r = 0; r < R; r++)
        for (i64 j = 0; j < R; j++)
            m->price[r * R + j] = (off_node + move) * m->size[j] - m->near[t->node_of[r] * R + j];
    for (i64 j = 0; j < R; j++)
        for (i64 k = 0; k < K; k++) {
            i64 e = after[j * K + k];
            if (e < 0 || repeats(after + j * K, k)) continue;
            for (i64 i = m->first[e]; i < m->first[e + 1]; i++) m->price[m->holder[i] * R + j] -= move;
        }
    for (i64 r = 0; r < R; r++) {
        m->price[r * R + r] -= 1;
        for (i64 j = 0; j < R; j++)
            if (r != j && (!m->size[r] || !m->size[j] || (t->what == INSIDE && t->node_of[r] != t->node_of[j])))
                m->price[r * R + j] = t->forbidden;
        if (!m->size[r]) m->price[r * R + r] = 0;
    }
}

static void by_node(const Task *t, i64 *part, Memory *m) {
    i64 R = t->num_ranks, N = t->num_nodes, cheapest = 1;
    for (i64 r = 0; r < R && cheapest; r++)
        for (i64 j = 0; j < R; j++) cheapest &= m->price[r * R + r] <= m->price[r * R + j];
    if (cheapest) return; /* part is as it is */
    for (i64 a = 0, start = 0; a < N; a++) {
        i64 mine = 0;
        while (start + mine < R && t->node_of[start + mine] == a) mine++;
        for (i64 b = 0, begin = 0; b < N; b++) {
            i64 theirs = 0;
            while (begin + theirs < R && t->node_of[begin + theirs] == b) theirs++;
            m->total[a * N + b] = R * t->forbidden;
            if (mine == theirs) {
                i64 *chosen = m->inside + start * N + b * mine, sum = 0;
                assign(mine, m->price + start * R + begin, R, chosen, m->scratch);
                for (i64 i = 0; i < mine; i++) sum += m->price[(start + i) * R + begin + chosen[i]], chosen[i] += begin;
                m->total[a * N + b] = sum;
            }
            begin += theirs;
        }
        start += mine;
    }
    assign(N, m->total, N, m->size, m->scratch); /* of each node; size is no longer needed */
    for (i64 a = 0, start = 0; a < N; a++) {
        i64 mine = 0;
        while (start + mine < R && t->node_of[start + mine] == a) mine++;
        memcpy(part + start, m->inside + start * N + m->size[a] * mine, sizeof(i64) * (size_t)mine);
        start += mine;
    }
}

/* Fills `part` where the layer changes; it holds each rank's own number before. Returns 0, or -1 without memory. */
i64 cheapest_parts(i64 address) {
    const Task *t = (const Task *)address;
    i64 R = t->num_ranks, K = t->slots, E = t->num_experts, N = t->num_nodes;
    i64 sizes[8] = {R * R, N * R, R, E + 2, R * K, N * N, R * N, 6 * R}, numbers = 0;
    for (int i = 0; i < 8; i++) numbers += sizes[i];
    char *all = malloc(sizeof(i64) * (size_t)numbers + (size_t)(N * E) + 1);
    if (!all) return -1;
    Memory memory, *m = &memory;
    i64 *next = (i64 *)all, **arrays[8] = {&m->price, &m->near, &m->size, &m->first, &m->holder, &m->total, &m->inside, &m->scratch};
    for (int i = 0; i < 8; i++) *arrays[i] = next, next += sizes[i];
    m->on_node = (uint8_t *)next;
    for (i64 layer = 0; layer < t->num_layers; layer++) {
        const int32_t *before = t->before + layer * R * K, *after = t->after + layer * R * K;
        if (!memcmp(before, after, sizeof(int32_t) * (size_t)(R * K))) continue;
        fill_price(t, before, after, m);
        if (t->what == NODES) by_node(t, t->part + layer * R, m);
        else assign(R, m->price, R, t->part + layer * R, m->scratch);
    }
    free(all);
    return 0;
}
