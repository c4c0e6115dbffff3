/* The texts of a rank, and where the last tokens of one came before in any of its scope: what followed there may follow
 * again. text_index.py has the contract, and owns the memory.
 *
 * Tokens lie in chunks, which are taken in turn, so the oldest are written over. A place is a token's number in that
 * ring. Places of runs of three tokens are chained by their hash, the newest first, as in zlib's deflate. Nothing is ever
 * removed: a place counts only if the tokens that lie there now, and their scope, are those that are looked for. */
#include <stdint.h>

typedef int64_t i64;
typedef uint64_t u64;
typedef int32_t i32;
typedef uint32_t u32;

enum { CHUNK = 128, RUN = 3, LONGEST = 32, TRIES = 8, NUM_CLASSES = 6 };
static const u32 NONE = UINT32_MAX;
static const float OWN_WEIGHT = 4; /* tokens as which what all texts have shown counts, beside what one has */

typedef struct {
    u64 scope;
    u32 text, length, before, after; /* chunks; NONE */
} Chunk;

typedef struct {
    u64 scope;
    u32 text;            /* its number, as its chunks have it */
    u32 last;            /* chunk, or NONE */
    u32 source, matched; /* where what may come next begins, or NONE; equal tokens before it */
    u32 followed;        /* the text that lay there when it was found */
    u32 offered;         /* of what was offered last, tokens that are not judged yet */
    float right, tried;
} Text;

typedef struct {
    i64 num_chunks, next_chunk, head_bits, num_texts;
    i64 chunks, tokens, earlier, heads, texts; /* addresses; earlier and heads: places + 1, 0: none */
    float right[2][NUM_CLASSES], tried[2][NUM_CLASSES]; /* of others' text and of own */
} Index;

static Chunk *chunk_of(const Index *index, u32 place) { return (Chunk *)index->chunks + place / CHUNK; }

static u32 behind(const Index *index, u32 place)
{
    const Chunk *chunk = chunk_of(index, place), *chunks = (Chunk *)index->chunks;
    if (place % CHUNK + 1 < chunk->length) return place + 1;
    if (place % CHUNK + 1 < CHUNK || chunk->after == NONE) return NONE;
    const Chunk *after = chunks + chunk->after;
    return after->text == chunk->text && after->length ? chunk->after * CHUNK : NONE;
}

static u32 before(const Index *index, u32 place)
{
    const Chunk *chunk = chunk_of(index, place), *chunks = (Chunk *)index->chunks;
    if (place % CHUNK) return place - 1;
    if (chunk->before == NONE || chunks[chunk->before].text != chunk->text) return NONE;
    if (chunks[chunk->before].length < CHUNK) return NONE; /* its text has taken it again */
    return chunk->before * CHUNK + CHUNK - 1;
}

/* Returns the place of the last token of a text; NONE: it has none, or it was written over. */
static u32 end_of(const Index *index, const Text *text)
{
    if (text->last == NONE) return NONE;
    const Chunk *chunk = (Chunk *)index->chunks + text->last;
    return chunk->text == text->text && chunk->length ? text->last * CHUNK + chunk->length - 1 : NONE;
}

/* Returns the head of the chain for the run that ends at a place; NULL where less than a run lies there. */
static u32 *head_of(const Index *index, u32 place, u64 scope)
{
    u64 hash = scope;
    for (int i = 0; i < RUN; i++, place = before(index, place)) {
        if (place == NONE) return 0;
        hash = (hash ^ (u32)((i32 *)index->tokens)[place]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return (u32 *)index->heads + (hash * 0x9e3779b97f4a7c15u >> (64 - index->head_bits));
}

static void append(Index *index, Text *text, i32 token)
{
    u32 end = end_of(index, text);
    Chunk *chunks = (Chunk *)index->chunks;
    if (end != NONE) { /* the run that ends there has something behind it now */
        u32 *head = head_of(index, end, text->scope);
        if (head) {
            ((u32 *)index->earlier)[end] = *head;
            *head = end + 1;
        }
    }
    if (end == NONE || end % CHUNK == CHUNK - 1) {
        u32 taken = (u32)index->next_chunk;
        index->next_chunk = (taken + 1) % index->num_chunks;
        u32 last = end == NONE || end / CHUNK == taken ? NONE : end / CHUNK;
        chunks[taken] = (Chunk){text->scope, text->text, 0, last, NONE};
        if (last != NONE) chunks[last].after = taken;
        text->last = taken;
    }
    Chunk *chunk = chunks + text->last;
    ((i32 *)index->tokens)[text->last * CHUNK + chunk->length++] = token;
}

static int class_of(u32 matched)
{
    if (matched >= 16) return matched < 32 ? 4 : 5;
    return matched < 4 ? 0 : matched < 6 ? 1 : matched < 9 ? 2 : 3;
}

/* Forgets the source of a text if another text, maybe of another scope, was written over it since. A text that takes
 * the same chunk again writes over it, too: what lies beyond its length is older. */
static void check_source(const Index *index, Text *text)
{
    if (text->source == NONE) return;
    const Chunk *chunk = chunk_of(index, text->source);
    if (chunk->text != text->followed || text->source % CHUNK >= chunk->length) text->source = NONE;
    if (text->source == NONE) text->matched = text->offered = 0;
}

/* Adds a token, and sees whether it is what was to come next. */
static void read_token(Index *index, Text *text, i32 token)
{
    append(index, text, token);
    check_source(index, text);
    if (text->source == NONE) return;
    int is_right = ((i32 *)index->tokens)[text->source] == token;
    if (text->offered) {
        int own = chunk_of(index, text->source)->text == text->text, class = class_of(text->matched);
        index->right[own][class] = 0.998f * index->right[own][class] + is_right;
        index->tried[own][class] = 0.998f * index->tried[own][class] + 1;
        text->right += is_right;
        text->tried += 1;
        text->offered = is_right ? text->offered - 1 : 0;
    }
    text->matched = is_right ? text->matched + 1 : 0;
    text->source = is_right ? behind(index, text->source) : NONE;
    if (text->source == NONE) text->matched = text->offered = 0;
}

/* Sets the source of a text: of the newest places of its last run, the one before which most tokens are equal. */
static void find(Index *index, Text *text)
{
    const i32 *tokens = (i32 *)index->tokens;
    u32 end = end_of(index, text), *head = end == NONE ? 0 : head_of(index, end, text->scope);
    if (!head) return;
    u32 place = *head;
    for (int number = 0; number < TRIES && place; number++, place = ((u32 *)index->earlier)[place - 1]) {
        u32 there = place - 1, here = end, equal = 0;
        const Chunk *chunk = chunk_of(index, there);
        if (chunk->scope != text->scope || there % CHUNK >= chunk->length || there == end) continue;
        u32 next = behind(index, there);
        while (equal < LONGEST && there != NONE && here != NONE && tokens[there] == tokens[here]) {
            equal++;
            there = before(index, there), here = before(index, here);
        }
        if (next == NONE || equal < RUN || equal <= text->matched) continue;
        text->source = next, text->matched = equal, text->followed = chunk->text;
        if (equal == LONGEST) return;
    }
}

/* Makes a text ready to be read. */
i64 begin_text(i64 at, i64 number, i64 scope)
{
    Index *index = (Index *)at;
    ((Text *)index->texts)[number] = (Text){(u64)scope, (u32)index->num_texts++, NONE, NONE, 0, 0, 0, 0, 0};
    return 0;
}

/* Adds new tokens to texts, one after the other, and finds what may come next in each.
 *
 * texts, counts: [num_texts] i32, of each which it is, and how many of `tokens` are new of it
 * most:   drafts of each, at most;  num_drafts, are_own: [num_texts] i32, what was found, and whether in its own text
 * drafts: [num_texts, most] i32;  chances: [num_texts, most] float, of each and those before it to be right; 0: none
 * Returns how many drafts were found. */
i64 look(i64 at, i64 num_texts, i64 texts, i64 counts, i64 tokens, i64 most, i64 num_drafts, i64 are_own, i64 drafts,
         i64 chances)
{
    Index *index = (Index *)at;
    const i32 *new = (i32 *)tokens;
    i64 num_found = 0;
    for (i64 i = 0; i < num_texts; i++) {
        Text *text = (Text *)index->texts + ((i32 *)texts)[i];
        for (i32 left = ((i32 *)counts)[i]; left > 0; left--) read_token(index, text, *new++);
    }
    for (i64 i = 0; i < num_texts && most; i++) {
        Text *text = (Text *)index->texts + ((i32 *)texts)[i];
        i32 *found = (i32 *)drafts + i * most, number = 0;
        float *chance = (float *)chances + i * most, all_right = 1;
        check_source(index, text); /* others have read since */
        if (text->source == NONE) text->matched = 0, find(index, text);
        int own = text->source != NONE && chunk_of(index, text->source)->text == text->text;
        u32 place = text->source;
        text->right *= 0.9f, text->tried *= 0.9f;
        for (i64 until_end = 0; number < most; number++) {
            if (place != NONE) {
                found[number] = ((i32 *)index->tokens)[place];
                place = behind(index, place);
                until_end++;
            } else if (own) {
                found[number] = found[number - until_end]; /* it goes on as it has since then */
            } else {
                break;
            }
            int class = class_of(text->matched + number);
            float usual = index->right[own][class] / index->tried[own][class];
            float right = (text->right + OWN_WEIGHT * usual) / (text->tried + OWN_WEIGHT);
            chance[number] = all_right *= right < 0.98f ? right : 0.98f;
        }
        text->offered = (u32)number;
        ((i32 *)num_drafts)[i] = number;
        ((i32 *)are_own)[i] = own;
        for (i64 rest = number; rest < most; rest++) chance[rest] = 0;
        num_found += number;
    }
    return num_found;
}
