/* Runs every kernel on awkward sizes, on the same numbers on every machine, and prints a line for each case: its sizes
   and a hash of the bits that it wrote. */
#include <stdio.h>
#include "all.c"

enum { ROOM_BYTES = 64 << 20, EPS_EXPONENT = 20 };

static char *room; /* what a case has drawn, given back at its end */
static i64 taken;
static uint64_t state;

static uint32_t next_bits(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
}

static void *get_room(i64 bytes)
{
    char *at = room + taken;
    taken += (bytes + 127) / 64 * 64;
    if (taken > ROOM_BYTES) abort();
    memset(at, 0, bytes);
    return at;
}

/* Multiples of 1 / 32768 from -scale to scale, a power of two. */
static float *floats(i64 n, float scale)
{
    float *x = get_room(n * 4);
    for (i64 i = 0; i < n; i++) x[i] = ((i64)(next_bits() % 65536) - 32768) * (scale / 32768);
    return x;
}

static i64 *integers(i64 n, i64 below)
{
    i64 *x = get_room(n * 8);
    for (i64 i = 0; i < n; i++) x[i] = next_bits() % below;
    return x;
}

/* A packed weight of so many elements: the order does not matter here. */
static char *weights(i64 n, i64 kind)
{
    float *wide = floats(n, 1);
    if (kind == FLOAT32) return (char *)wide;
    char *w = get_room(n * word_bytes(kind) / k_per_word(kind));
    for (i64 i = 0; i < n; i++) {
        uint32_t bits, byte = next_bits() & 0xff;
        memcpy(&bits, wide + i, 4);
        if (kind == BFLOAT16) ((uint16_t *)w)[i] = bits >> 16;
        else w[i] = kind == E4M3 && (byte & 0x7f) == 0x7f ? 0 : byte; /* no NaN */
    }
    return w;
}

/* A weight in groups of so many bytes, whose scales are small whatever their dtype. */
static char *group_weights(i64 n)
{
    char *w = get_room(n);
    for (i64 i = 0; i < n; i++) w[i] = next_bits() & 0x37;
    return w;
}

static i64 bits_of(double number)
{
    i64 bits;
    memcpy(&bits, &number, 8);
    return bits;
}

static i64 eps_bits(void) { return bits_of(1.0 / (1 << EPS_EXPONENT)); }

static uint64_t hash_of(const void *data, i64 bytes)
{
    uint64_t hash = 14695981039346656037u;
    for (i64 i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

static void say(const char *what, i64 a, i64 b, i64 c, i64 d, const void *data, i64 bytes)
{
    printf("%s %lld %lld %lld %lld: %016llx\n", what, (long long)a, (long long)b, (long long)c, (long long)d,
           (unsigned long long)hash_of(data, bytes));
}

static void begin_case(void) { taken = 0, state = 1; }

static void probe_linear(i64 rows, i64 n, i64 k, i64 kind, i64 heads)
{
    begin_case();
    char *w = weights(heads * padded_to_32(n) * padded_to_2(k), kind);
    Linear facts = {.heads = heads, .n = n, .k = k, .kind = kind, .weight = w};
    if (kind == FLOAT32) facts.bias = floats(heads * n, 1);
    float *x = floats(rows * heads * k, 1), *y = get_room(rows * heads * n * 4);
    linear(&facts, x, rows, heads * k, k, y, heads * n, n);
    say(heads > 1 ? "heads" : "linear", rows, n, k, kind, y, rows * heads * n * 4);
}

static void probe_experts(i64 rows, i64 hidden, i64 width, i64 kind, i64 slab_rows)
{
    begin_case();
    enum { SLOTS = 3 };
    i64 across = (hidden + 127) / 128, along = (width + 127) / 128, padded_width = padded_to_32(width);
    i64 counts[SLOTS] = {1, 0, rows - 1}, room_rows = slab_rows ? SLOTS * slab_rows : rows;
    Experts facts = {.slots = SLOTS, .hidden = hidden, .width = width, .kind = kind, .activation = SILU};
    facts.gate_up = weights(SLOTS * 2 * padded_width * padded_to_2(hidden), kind);
    facts.down = weights(SLOTS * padded_to_32(hidden) * padded_to_2(width), kind);
    if (kind == INT8) facts.gate_up_scale = floats(SLOTS * 2 * width, 1.0f / 64), facts.down_scale = floats(SLOTS * hidden, 1.0f / 64);
    if (kind == E4M3)
        facts.gate_up_scale = floats(SLOTS * 2 * along * across, 1.0f / 64), facts.down_scale = floats(SLOTS * across * along, 1.0f / 64);
    float *x = floats(room_rows * hidden, 1), *y = get_room(room_rows * hidden * 4);
    expert_ffn(&facts, x, hidden, counts, slab_rows, get_room(rows * padded_width * 4), y, hidden);
    say("experts", rows, hidden, width, kind, y, room_rows * hidden * 4);
    facts.activation = CLAMPED_SWIGLU, facts.alpha = 1.702, facts.limit = 0.5;
    facts.gate_up_bias = floats(SLOTS * 2 * width, 1), facts.down_bias = floats(SLOTS * hidden, 1);
    expert_ffn(&facts, x, hidden, counts, slab_rows, get_room(rows * padded_width * 4), y, hidden);
    say("experts with biases", rows, hidden, width, kind, y, room_rows * hidden * 4);
}

static void probe_groups(i64 rows, i64 n, i64 k, Groups groups)
{
    begin_case();
    Linear facts = {.heads = 1, .n = n, .k = k, .kind = GROUPS, .bias = floats(n, 1), .groups = &groups};
    facts.weight = group_weights(padded_to_32(n) * group_bytes(&groups, k));
    float *x = floats(rows * k, 1), *y = get_room(rows * n * 4);
    for (groups.int8 = 0; groups.int8 < 2; groups.int8++) {
        linear(&facts, x, rows, k, 0, y, n, 0);
        say(groups.int8 ? "groups by int8" : "groups", rows, n, k, groups.bits * 1000 + groups.group, y, rows * n * 4);
    }
}

static void probe_quantise(i64 rows, i64 k)
{
    begin_case();
    static const float shares[SHARES] = {0.7f, 0.75f, 0.8f, 0.85f, 0.9f, 1};
    uint8_t *codes = get_room(rows * k);
    uint16_t *scales = get_room(rows * ((k + 31) / 32) * 2);
    quantise_groups(floats(rows * k, 1.0f / 1024), rows, k, 32, -8, 7, shares, codes, scales);
    say("quantise_groups", rows, k, 0, 0, codes, rows * k);
    say("quantise_groups, scales", rows, k, 0, 0, scales, rows * ((k + 31) / 32) * 2);
}

/* One sequence that decodes behind `context` keys, and a chunk of 5 tokens. latent: 0 = keys and values of heads */
static void probe_attention(i64 heads, i64 group, i64 width, i64 latent, i64 context)
{
    begin_case();
    enum { BLOCK = 16, CHUNK = 5, SEQUENCES = 2 };
    i64 table_width = context / BLOCK + 1, positions[1 + CHUNK] = {context - 1}, pieces[SEQUENCES + 1];
    i64 value_width = latent ? latent : width, row = latent ? width : 2 * heads * width;
    i32 starts[] = {0, 1, 1 + CHUNK}, *tables = get_room(SEQUENCES * table_width * 4);
    for (i64 i = 0; i < CHUNK; i++) positions[1 + i] = context / 2 + i;
    for (i64 i = 0; i < SEQUENCES * table_width; i++) tables[i] = i * 7 % (SEQUENCES * table_width);
    Attend facts = {SEQUENCES, 1 + CHUNK, heads, group, width, value_width, latent ? 0 : heads * width, width, row,
                    BLOCK, table_width, table_width, positions, starts, tables, pieces, 0.125};
    float *q = floats((1 + CHUNK) * heads * group * width, 4), *cache = floats(SEQUENCES * table_width * BLOCK * row, 1);
    float *out = get_room((1 + CHUNK) * heads * group * value_width * 4);
    CachedForm form = {FLOAT32, row};
    attend_plan(&facts);
    for (i64 window = 0; window < 200; window = window * 3 + 5) {
        attend(&facts, 0, q, heads * group * width, cache, out, window, window ? floats(heads * group, 1) : 0, 0, &form);
        char name[40];
        snprintf(name, sizeof name, "attend, window %d", (int)window);
        say(name, heads, group, width, context, out, (1 + CHUNK) * heads * group * value_width * 4);
    }
}

static void probe_norms(i64 rows, i64 n)
{
    begin_case();
    float *x = floats(rows * n, 2), *delta = floats(rows * n, 2), *weight = floats(n, 1), *y = get_room(2 * rows * n * 4);
    rms_norm(x, rows, n, n, weight, eps_bits(), y, n);
    add_rms_norm(x, delta, rows, n, n, n, weight, eps_bits(), bits_of(0.3), y + rows * n);
    add_rows(delta, x, rows, n);
    say("rms_norm, add_rms_norm", rows, n, 0, 0, y, 2 * rows * n * 4);
    layer_norm(x, delta, rows, n, n, n, weight, floats(n, 1), eps_bits(), y);
    say("layer_norm", rows, n, 0, 0, y, rows * n * 4);
    add_gated_rows(x, delta, rows, n, floats(rows, 4));
    clip_rows(x, rows, n, n, bits_of(1.5));
    say("add_gated_rows, clip_rows", rows, n, 0, 0, x, rows * n * 4);
    say("add_rows", rows, n, 0, 0, delta, rows * n * 4);
}

static void probe_rope(i64 rows, i64 heads, i64 kv_heads, i64 width, i64 has_norm)
{
    begin_case();
    i64 step = (heads + 2 * kv_heads) * width, *slots = integers(rows, 1);
    for (i64 t = 0; t < rows; t++) slots[t] = t % 3 ? t : -1;
    float *qkv = floats(rows * step, 2), *norm = has_norm ? floats((heads + kv_heads) * width, 1) : 0;
    float *cache = get_room(rows * 2 * kv_heads * width * 4);
    RopeShape shape = {heads, kv_heads, width, width, 0};
    rope_write(&shape, qkv, rows, step, norm, eps_bits(), floats(rows * width, 1), slots, cache,
               &(CachedForm){FLOAT32, 2 * kv_heads * width});
    say("rope_write: qkv", rows, heads, width, has_norm, qkv, rows * step * 4);
    say("rope_write: cache", rows, heads, width, has_norm, cache, rows * 2 * kv_heads * width * 4);
}

static void probe_mla_rope(i64 rows, i64 heads, i64 nope, i64 latent, i64 rotated)
{
    begin_case();
    MlaShape shape = {heads, nope + rotated, latent, rotated};
    i64 width = latent + rotated, q_step = heads * (nope + rotated), *slots = integers(rows, 1);
    for (i64 t = 0; t < rows; t++) slots[t] = t;
    float *q = floats(rows * q_step, 2), *row = floats(rows * width, 2), *norm = floats(latent, 1);
    float *cache = get_room(rows * width * 4);
    mla_rope_write(&shape, q, q_step, row, width, rows, norm, eps_bits(), floats(rows * rotated, 1), slots, cache,
                   &(CachedForm){FLOAT32, width});
    say("mla_rope_write: q", rows, heads, nope, rotated, q, rows * q_step * 4);
    say("mla_rope_write: cache", rows, heads, latent, rotated, cache, rows * width * 4);
}

/* Two sequences: one goes on with the state of another slot, and one keeps a copy of its own. */
static void probe_states(i64 rows, i64 groups, i64 heads, i64 state_width, i64 width, i64 taps)
{
    begin_case();
    i64 inner = heads * width, keys = groups * state_width, channels = inner + 2 * keys, step = inner + channels + heads;
    i64 size = heads * ((width + 31) / 32) * state_width * 32, slots[] = {2, 0, 0, 0, -1, 1, 2, 3};
    i32 starts[] = {0, rows / 3, rows};
    Sequences seqs = {2, starts, slots, 4};
    float *row = floats(rows * step, 2), *before = floats(4 * (taps - 1) * channels, 2);
    float *mixed = get_room(rows * channels * 4), *out = get_room(rows * inner * 4);
    float *decay = floats(heads, 1), *bias = floats(heads, 1), *states = floats(4 * size, 1);
    for (i64 h = 0; h < heads; h++) decay[h] -= 1.5f;
    ConvFacts conv = {channels, taps, inner, -1, 0, 1, floats(taps * channels, 1), floats(channels, 1)};
    causal_conv(&conv, &seqs, row, step, before, mixed);
    say("causal_conv", rows, channels, taps, 0, mixed, rows * channels * 4);
    say("causal_conv: states", rows, channels, taps, 0, before, 4 * (taps - 1) * channels * 4);
    StateSpaceFacts facts = {groups, heads, state_width, width, decay, bias, floats(heads, 1)};
    state_space(&facts, &seqs, mixed, channels, row + step - heads, step, states, out);
    say("state_space", rows, heads, state_width, width, out, rows * inner * 4);
    say("state_space: states", rows, heads, state_width, width, states, 4 * size * 4);
    gated_rms_norm(out, rows, inner, inner, row, step, groups, floats(inner, 1), eps_bits());
    say("gated_rms_norm", rows, inner, groups, 0, out, rows * inner * 4);
    i64 tiles = (inner + 31) / 32;
    float *by_tile = floats(tiles * state_width * 32, 1), *own_states = floats(4 * tiles * state_width * 32, 1);
    for (i64 i = 0; i < tiles * state_width * 32; i++) by_tile[i] -= 1.5f;
    SelectiveFacts selective = {inner, state_width, by_tile, floats(inner, 1), floats(inner, 1)};
    selective_space(&selective, &seqs, mixed, channels, floats(rows * inner, 2), inner, mixed + inner, channels, row, step,
                    own_states, out);
    say("selective_space", rows, inner, state_width, 0, out, rows * inner * 4);
    say("selective_space: states", rows, inner, state_width, 0, own_states, 4 * tiles * state_width * 32 * 4);
    i64 columns[heads * DELTA_PARTS], wide = 2 * (keys + inner) + 2 * heads;
    for (i64 h = 0; h < heads; h++) {
        i64 key = h / (heads / groups) * state_width, value = 2 * keys + h * width, strength = 2 * (keys + inner) + h;
        i64 of_head[] = {key, keys + key, value, value + inner, strength + heads, strength};
        memcpy(columns + h * DELTA_PARTS, of_head, sizeof of_head);
    }
    DeltaFacts delta = {groups, heads, state_width, width, taps, columns, conv.weight, decay, bias, floats(width, 1),
                        eps_bits(), 0, 0};
    delta_rule(&delta, &seqs, floats(rows * wide, 2), wide, 0, 0, 0, 0, before, states, out);
    say("delta_rule", rows, heads, state_width, width, out, rows * inner * 4);
    say("delta_rule: states", rows, heads, state_width, width, states, 4 * size * 4);
    keys = heads * state_width, channels = 2 * keys + inner, wide = channels + heads;
    for (i64 h = 0; h < heads; h++) {
        i64 key = h * state_width, of_head[] = {key, keys + key, 2 * keys + h * width, 0, 0, channels + h};
        memcpy(columns + h * DELTA_PARTS, of_head, sizeof of_head);
    }
    for (int is_bounded = 0; is_bounded < 2; is_bounded++) {
        DeltaFacts own = {heads, heads, state_width, width, taps, columns, floats(taps * channels, 1), decay,
                          floats(keys, 1), floats(width, 1), eps_bits(), 1, is_bounded ? bits_of(-5) : 0};
        float *steps = floats(rows * keys, 2), *gates = floats(rows * inner, 2), *last = floats(4 * (taps - 1) * channels, 2);
        delta_rule(&own, &seqs, floats(rows * wide, 2), wide, steps, keys, gates, inner, last, states, out);
        say("delta_rule by channel", rows, heads, state_width, is_bounded, out, rows * inner * 4);
        say("delta_rule by channel: states", rows, heads, state_width, is_bounded, states, 4 * size * 4);
    }
}

static void probe_moves(i64 tokens, i64 topk, i64 width, i64 slots)
{
    begin_case();
    i64 *ids = integers(tokens * topk, slots), counts[64], counted[64], *index = get_room(tokens * topk * 8);
    ids[0] = -1;
    float *rows = get_room(tokens * topk * width * 4), *out = get_room(tokens * width * 4);
    float *x = floats(tokens * width, 1), *by_weight = floats(tokens * topk, 1);
    pack_rows(x, width, width, ids, tokens, topk, slots, rows, counts, index);
    count_ids(ids, tokens, topk, slots, counted);
    weighted_sum(rows, width, index, tokens, topk, by_weight, out);
    say("pack_rows", tokens, topk, width, slots, index, tokens * topk * 8);
    say("count_ids", tokens, topk, width, slots, counted, slots * 8);
    say("weighted_sum", tokens, topk, width, slots, out, tokens * width * 4);
    for (i64 packed = 0; packed < 2; packed++)
        for (i64 kind = FLOAT32; kind <= BFLOAT16; kind++) {
            char *table = weights(padded_to_32(slots) * padded_to_2(width), kind);
            gather_rows(table, kind, packed, slots, width, 0, integers(tokens, slots), tokens, out);
            say("gather_rows", tokens, width, kind, packed, out, tokens * width * 4);
        }
}

static void probe_gate(i64 rows, i64 experts, i64 topk, i64 sigmoid, i64 groups)
{
    begin_case();
    GateShape shape = {.experts = experts, .topk = topk, .scoring = sigmoid ? SIGMOID : SOFTMAX, .norm_topk = 1};
    shape.groups = groups, shape.topk_groups = (groups + 1) / 2, shape.scaling = 2.5, shape.norm_eps = 1e-20;
    float *bias = sigmoid ? floats(experts, 0.25) : 0, *logits = floats(rows * experts, 8), *by = get_room(rows * topk * 4);
    i64 *ids = get_room(rows * topk * 8), *load = get_room(experts * 8);
    gate(&shape, bias, logits, rows, experts, ids, by, load, 0, 0);
    say("gate: ids", rows, experts, topk, sigmoid, ids, rows * topk * 8);
    say("gate: weights", rows, experts, topk, sigmoid, by, rows * topk * 4);
    say("gate: load", rows, experts, topk, sigmoid, load, experts * 8);
}

static void probe_streams(i64 rows, i64 streams, i64 width)
{
    begin_case();
    i64 size = (2 + streams) * streams;
    float *x = floats(rows * streams * width, 1), *by = floats(rows * size, 1), *out = get_room(rows * width * 4);
    Streams facts = {streams, width, 5, 1, floats(size, 1), floats(3, 1), 1e-6, 1e-6};
    sum_streams(&facts, x, rows, by, size, out);
    say("sum_streams", rows, streams, width, 0, out, rows * width * 4);
    mix_streams(&facts, x, rows, by, size, floats(rows * width, 1));
    say("mix_streams", rows, streams, width, 0, x, rows * streams * width * 4);
}

static void probe_sampling(i64 rows, i64 vocab)
{
    begin_case();
    static const Sampling kinds[] = {{0, 1, 0, -1}, {1, 1, 0, -1}, {0.7, 0.9, 0, -1}, {1.5, 1, 0.02, -1}, {1, 0.8, 0.01, 40}};
    Sampling *how = get_room(rows * sizeof *how);
    for (i64 r = 0; r < rows; r++) how[r] = kinds[r % 5], how[r].seed = r * 977, how[r].output_index = r + 3;
    float *logits = floats(rows * vocab, 4);
    i64 *tokens = get_room(rows * 8), banned = 0;
    LogitChanges *changes = get_room(rows * sizeof *changes);
    changes[rows - 1] = (LogitChanges){.banned = &banned, .num_banned = 1}; /* the last row may not get token 0 */
    sample_rows((i64)logits, vocab, vocab, rows, (i64)how, (i64)changes, (i64)tokens);
    say("sample_rows", rows, vocab, 0, 0, tokens, rows * 8);
}

int main(void)
{
    static const i64 rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 40, 200}, widths[] = {1, 15, 16, 17, 31, 33, 64, 100, 150};
    static const i64 depths[] = {1, 17, 150, 513};
    room = aligned_alloc(64, ROOM_BYTES);
    for (i64 kind = FLOAT32; kind <= E4M3; kind++)
        for (int r = 0; r < 10; r++) {
            for (int n = 0; n < 9 && kind <= BFLOAT16; n++)
                for (int k = 0; k < 4; k++) probe_linear(rows[r], widths[n], depths[k], kind, 1);
            if (kind <= BFLOAT16) probe_linear(rows[r], 40, 70, kind, 3);
            probe_experts(rows[r] + 1, 150, 70, kind, 0);
            probe_experts(rows[r] + 1, 256, 160, kind, 0);
            probe_experts(rows[r] + 1, 40, 33, kind, 256);
        }
    static const Groups forms[] = {{4, 32, SCALES_FLOAT16, 8, 0, 0}, {4, 16, SCALES_TWO_LEVELS, 0, 1, 0},
                                   {8, 128, SCALES_BFLOAT16, -1, 0, 0}, {8, 64, SCALES_FLOAT32, 128, 0, 0}};
    for (int form = 0; form < 4; form++)
        for (int r = 0; r < 10; r++)
            for (int n = 0; n < 9; n++) probe_groups(rows[r], widths[n], depths[n % 4], forms[form]);
    probe_quantise(5, 300), probe_quantise(1, 20);
    for (i64 context = 1; context < 300; context = context * 2 + 3) {
        probe_attention(2, 3, 40, 0, context);
        probe_attention(1, 1, 17, 0, context);
        probe_attention(4, 8, 128, 0, context);
        probe_attention(1, 4, 72, 56, context);
        probe_attention(1, 16, 576, 512, context);
    }
    for (int n = 0; n < 9; n++) probe_norms(5, widths[n]), probe_moves(13, 3, widths[n], 5);
    probe_norms(2, 2048), probe_moves(7, 8, 512, 40);
    for (i64 has_norm = 0; has_norm < 2; has_norm++)
        probe_rope(13, 2, 1, 34, has_norm), probe_rope(5, 8, 2, 64, has_norm), probe_rope(3, 1, 1, 2, has_norm);
    probe_mla_rope(5, 3, 20, 50, 6), probe_mla_rope(2, 16, 128, 512, 64);
    for (i64 sigmoid = 0; sigmoid < 2; sigmoid++)
        probe_gate(13, 24, 3, sigmoid, 1), probe_gate(40, 256, 8, sigmoid, 8), probe_gate(1, 2, 1, sigmoid, 1);
    probe_states(13, 1, 3, 7, 33, 4), probe_states(40, 2, 4, 16, 64, 3), probe_states(5, 1, 1, 128, 8, 2);
    probe_streams(13, 4, 64), probe_streams(5, 3, 37);
    probe_sampling(20, 7), probe_sampling(20, 300), probe_sampling(10, 5001);
    return 0;
}
