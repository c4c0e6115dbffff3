/* Carries rows, results and words between hosts: one-sided writes into the shared memory of another host, over TCP.

   A rank has a connection with each rank of other hosts. What it sends to a host goes to one rank there. A frame says
   where its data go: into which regions, at which offset, and which flag is raised there once they are. The rank that
   takes a frame in writes for all ranks of its host, so a row crosses the network once for each host. Frames of a
   connection are applied in their order, data before flags, so that a rank that sees a flag sees the data, as with a
   peer of its own host.

   Whoever waits for a flag polls the connections. While a rank computes, a thread of its own does. link.py builds it.
   All arguments are int64, numbers or addresses.

   Connections end and are made anew, and the group goes on to new epochs, while threads send and receive. No data are
   ever taken for others, because:
   - A flag is raised after the last byte of its frame. A frame that was cut raises none, and no other frame's, since a
     new connection begins with a header at both ends (link_attach).
   - Frames are lost only when a connection ends. Then the rank that sent them sees it (link_broken) and voids the epoch,
     unless the others have masked it.
   - A frame carries its epoch. A rank that leaves an epoch takes in no more frames of it or of older ones
     (link_void), nor do ranks of its host that are to be masked (link_fence), and it sees to that before it proposes the
     next. So when an epoch is decided, nobody applies older frames any more on a host that takes part, and these do not
     fall on newer data that came by another connection.
   - What is sent does not change on the way: rows belong to the caller and a send buffer is used again, but only once
     they have gone. When an epoch ends before that, frames that have not begun are dropped, and the connection of one
     that has begun is closed. */

#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "../shm/row_copy.h"

enum {
    MOST = 64,                 /* regions, and connections of each direction; sets of them are the bits of a word */
    BUFFER_BYTES = 1 << 17,    /* what is taken in at once where it goes to many places */
    DIRECT_BYTES = 1 << 14,    /* what is left of a write is received in place from this size on */
    MOST_VECTORS = 256,        /* of one system call */
    MOST_TOLD = 64,            /* batches of link_tell that wait for a connection that makes no progress */
    MOST_LATER = 16,           /* flags that wait for the next batch */
    ACTIVE_NS = 20 * 1000000,  /* the thread looks for so long after the last frame, then sleeps until one comes */
    PAUSE_NS = 150 * 1000,     /* of the thread, while more can be sent soon, or somebody who waits polls */
    LOOK_MS = 5,               /* between two looks of the thread that nothing wakes */
    LOW_BYTES = 1 << 18,       /* that wake it */
};
#define NO_FLAG (-1)
#define MAGIC 0x6c6e6b32u /* also the version of the format */
#define ANY_EPOCH UINT32_MAX /* of frames that are applied in every epoch */
typedef uint64_t u64;

enum { WRITE = 1, ROWS = 2 };

typedef struct {
    uint32_t magic;
    uint16_t kind, space;
    u64 mask;         /* regions of the space, by rank */
    i64 offset;       /* where data go in each of them */
    i64 length;       /* bytes of a write; of rows their number */
    uint32_t row_bytes; /* of rows; the masks of the regions that each goes to stand before them */
    uint32_t epoch;
    i64 flag_offset;  /* of a word in each region, or NO_FLAG */
    i64 flag;
} Frame;

typedef struct Batch {
    struct Batch *next;
    struct iovec *vectors;
    i64 num, room, first; /* first: that is not sent yet */
    int has_begun, borrows; /* borrows: it refers to memory of the caller */
    uint32_t epoch;
    i64 number;           /* of the link's batches, in the order in which they were posted */
    uint8_t *small;       /* what is copied: frames, masks */
    i64 small_used, small_room;
} Batch;

/* The two directions of the connection with a rank; fd is -1 before there is one, and after it has ended. */
typedef struct {
    int fd;
    Batch *head, *tail;
    i64 sent;
    i64 num_told;  /* batches of link_tell */
    i64 num_later; /* flags that go with the next batch */
    Frame later[MOST_LATER];
} Outgoing;

typedef struct {
    int fd;
    uint8_t *buffer;
    i64 begin, end;
    int state; /* of the frame below */
    Frame frame;
    u64 *masks;
    i64 num_masks, row, done; /* row: of ROWS;  done: bytes of the write, or of the row, or that are still ignored */
    i64 counts[MOST];         /* rows that each region has got */
    i64 received;
} Incoming;

/* The regions of one transport, or of whatever else shares memory: one for each rank. */
typedef struct {
    uint8_t *regions[MOST];
    i64 sizes[MOST];
    int is_shared; /* else this rank has not come so far */
} Space;

/* oldest: frames of epochs before it are not taken in;  is_applying: the rank takes in frames right now */
typedef struct {
    i64 oldest, is_applying;
} Guard;

typedef struct {
    Space spaces[MOST];
    Outgoing out[MOST]; /* by rank, as all that follow */
    Incoming in[MOST];
    int sockets[MOST];      /* open as long as a thread may use them */
    int errors[MOST];       /* why there is no connection; 0: there is one */
    i64 generations[MOST];  /* connections so far */
    i64 expected[MOST];     /* the generation of this epoch */
    i64 num_ranks;          /* above the highest that was ever connected */
    uint32_t epoch, oldest; /* of what is sent, and of what is taken in */
    Guard *guard;           /* in memory that all ranks of the host share; NULL: this one is alone there */
    Batch *spare;
    i64 num_posted;
    pthread_mutex_t sending, receiving; /* both are taken in this order */
    pthread_t thread;
    int low; /* bytes that wake the thread */
    int has_thread, ends, epoll, wake, news; /* news: counts connections that have ended */
    i64 polled_ns, busy_ns; /* when somebody who waits has polled last; when a frame came or went last */
} Link;

static i64 now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void lock(Link *link)
{
    pthread_mutex_lock(&link->sending);
    pthread_mutex_lock(&link->receiving);
}

static void unlock(Link *link)
{
    pthread_mutex_unlock(&link->receiving);
    pthread_mutex_unlock(&link->sending);
}

static void add_one(int eventfd)
{
    u64 one = 1;
    if (write(eventfd, &one, sizeof one) < 0)
        return; /* it has been woken often enough */
}

/* Notes that a connection has ended. The socket stays open for the thread that uses the other direction, which finds
   the end of it there. */
static void end(Link *link, i64 rank, int error)
{
    int none = 0;
    __atomic_compare_exchange_n(link->errors + rank, &none, error, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    shutdown(link->sockets[rank], SHUT_RDWR);
    add_one(link->news);
}

/* --- sending --- */

/* Returns a batch with room for so many vectors and bytes that are copied. */
static Batch *new_batch(Link *link, i64 num_vectors, i64 num_bytes)
{
    Batch *batch = link->spare;
    num_vectors += 1; /* of flags that waited for it */
    num_bytes += MOST_LATER * sizeof(Frame);
    if (batch)
        link->spare = batch->next;
    else
        batch = calloc(1, sizeof(Batch));
    if (batch->room < num_vectors) {
        batch->room = 2 * num_vectors;
        batch->vectors = realloc(batch->vectors, batch->room * sizeof(struct iovec));
    }
    if (batch->small_room < num_bytes) {
        batch->small_room = 2 * num_bytes;
        batch->small = realloc(batch->small, batch->small_room);
    }
    batch->num = batch->first = batch->small_used = 0;
    batch->has_begun = batch->borrows = 0;
    batch->epoch = link->epoch;
    batch->next = NULL;
    return batch;
}

static void give_back(Link *link, Batch *batch)
{
    batch->next = link->spare;
    link->spare = batch;
}

static void drop_all(Link *link, Outgoing *out)
{
    for (Batch *batch = out->head, *next; batch; batch = next) {
        next = batch->next;
        give_back(link, batch);
    }
    out->head = NULL;
    out->num_told = 0;
}

static void add_vector(Batch *batch, const void *data, i64 size)
{
    struct iovec *last = batch->vectors + batch->num - 1;
    if (!size)
        return;
    if (batch->num && (uint8_t *)last->iov_base + last->iov_len == (const uint8_t *)data)
        last->iov_len += size;
    else
        batch->vectors[batch->num++] = (struct iovec){(void *)data, size};
}

static void *add_small(Batch *batch, i64 size)
{
    uint8_t *at = batch->small + batch->small_used;
    batch->small_used += size;
    add_vector(batch, at, size);
    return at;
}

static void add_frame(Batch *batch, i64 kind, i64 space, u64 mask, i64 offset, i64 length, i64 row_bytes, i64 flag_offset,
                      i64 flag)
{
    Frame frame = {MAGIC, kind, space, mask, offset, length, row_bytes, batch->epoch, flag_offset, flag};
    memcpy(add_small(batch, sizeof frame), &frame, sizeof frame);
}

/* Sends what the connection takes. Returns the bytes that went. */
static i64 push(Link *link, Outgoing *out)
{
    i64 all = 0;
    while (out->head && out->fd >= 0) {
        Batch *batch = out->head;
        i64 num = batch->num - batch->first;
        struct msghdr message = {.msg_iov = batch->vectors + batch->first,
                                 .msg_iovlen = num < MOST_VECTORS ? num : MOST_VECTORS};
        ssize_t size = num ? sendmsg(out->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
        if (size < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                out->fd = -1;
                end(link, out - link->out, errno);
                drop_all(link, out);
            }
            break;
        }
        all += size;
        batch->has_begun |= size > 0;
        while (batch->first < batch->num && size >= (ssize_t)batch->vectors[batch->first].iov_len)
            size -= batch->vectors[batch->first++].iov_len;
        if (batch->first < batch->num) {
            batch->vectors[batch->first].iov_base = (uint8_t *)batch->vectors[batch->first].iov_base + size;
            batch->vectors[batch->first].iov_len -= size;
            continue;
        }
        out->head = batch->next;
        out->num_told -= batch->epoch == ANY_EPOCH;
        give_back(link, batch);
    }
    __atomic_add_fetch(&out->sent, all, __ATOMIC_RELAXED);
    return all;
}

static void post(Link *link, i64 to, Batch *batch)
{
    Outgoing *out = link->out + to;
    int is_told = batch->epoch == ANY_EPOCH;
    if (is_told && out->num_told == MOST_TOLD) {
        give_back(link, batch);
        return;
    }
    if (out->fd < 0 && (is_told || link->expected[to] <= link->generations[to])) {
        if (!is_told)
            out->num_later = 0;
        give_back(link, batch); /* else it waits for the first connection of this epoch */
        return;
    }
    if (out->num_later)
        memcpy(add_small(batch, out->num_later * sizeof(Frame)), out->later, out->num_later * sizeof(Frame));
    out->num_later = 0;
    batch->number = link->num_posted++;
    if (out->head)
        out->tail->next = batch;
    else
        out->head = batch;
    out->tail = batch;
    out->num_told += is_told;
    push(link, out);
    __atomic_store_n(&link->busy_ns, now_ns(), __ATOMIC_RELAXED);
    if (out->head) /* the thread goes on with it */
        add_one(link->wake);
}

/* Writes data into regions of the host of rank `to`, and a flag behind them. Data are copied. */
static void write_data(Link *link, i64 to, i64 space, i64 mask, i64 offset, const void *data, i64 size, i64 flag_offset,
                       i64 flag, int any_epoch)
{
    pthread_mutex_lock(&link->sending);
    Batch *batch = new_batch(link, 2, sizeof(Frame) + size);
    if (any_epoch)
        batch->epoch = ANY_EPOCH;
    add_frame(batch, WRITE, space, mask, offset, size, 0, flag_offset, flag);
    memcpy(add_small(batch, size), data, size);
    post(link, to, batch);
    pthread_mutex_unlock(&link->sending);
}

void link_write(Link *link, i64 to, i64 space, i64 mask, i64 offset, const void *data, i64 size, i64 flag_offset, i64 flag)
{
    write_data(link, to, space, mask, offset, data, size, flag_offset, flag, 0);
}

/* The same in whatever epoch either end is. */
void link_tell(Link *link, i64 to, i64 space, i64 mask, i64 offset, const void *data, i64 size)
{
    write_data(link, to, space, mask, offset, data, size, NO_FLAG, 0, 1);
}

/* Sends the flags that wait. */
static void post_later(Link *link)
{
    for (i64 to = 0; to < link->num_ranks; to++)
        if (link->out[to].num_later)
            post(link, to, new_batch(link, 0, 0));
}

/* Raises a flag in regions of the host of rank `to` with the next batch that goes there, or when somebody waits. */
void link_later(Link *link, i64 to, i64 space, i64 mask, i64 flag_offset, i64 flag)
{
    pthread_mutex_lock(&link->sending);
    Outgoing *out = link->out + to;
    if (out->num_later == MOST_LATER)
        post_later(link);
    out->later[out->num_later++] = (Frame){MAGIC, WRITE, space, mask, 0, 0, 0, link->epoch, flag_offset, flag};
    pthread_mutex_unlock(&link->sending);
}

/* Sends what `send_rows` has planned to ranks of the host of rank `to`: their heads and entries, and each row once. The
   rows must stay as they are until link_unsent returns 0 for what was posted until then.  ranks: as bits */
void link_rows(Link *link, i64 to, i64 space, const i64 *facts, i64 buffer, i64 ranks, i64 num_tokens, i64 topk,
               const uint8_t *rows, i64 *block, i64 flag_offset, i64 flag)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], row_bytes = facts[ROW_BYTES];
    u64 mask = (u64)ranks;
    const i64 *table = slice_table(facts, buffer);
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    i64 next[MOST] = {0}, num_rows = 0, rows_at = 0;
    if (!mask)
        return;
    pthread_mutex_lock(&link->sending);
    Batch *batch = new_batch(link, 8 * MOST + 2 * num_tokens, (4 * MOST + 1) * sizeof(Frame) + num_tokens * sizeof(u64));
    batch->borrows = 1;
    for (i64 rank = 0; rank < num_ranks; rank++) {
        if (!TAKES_PART(mask, rank))
            continue;
        uint8_t *base = link->spaces[space].regions[rank], *head = SLICE(table, rank, OUT_HEAD);
        uint8_t *entries = SLICE(table, rank, OUT_ENTRIES), *weights = SLICE(table, rank, OUT_WEIGHTS);
        i64 num_entries = 0, size = (slots + 1) * sizeof(i64);
        for (i64 slot = 0; slot < slots; slot++)
            num_entries += ex.counts[rank * slots + slot];
        add_frame(batch, WRITE, space, (u64)1 << rank, head - base, size, 0, NO_FLAG, 0);
        add_vector(batch, head, size);
        size = num_entries * sizeof(int32_t);
        if (size) {
            add_frame(batch, WRITE, space, (u64)1 << rank, entries - base, size, 0, NO_FLAG, 0);
            add_vector(batch, entries, size);
        }
        if (size && facts[RANK_SUM]) {
            add_frame(batch, WRITE, space, (u64)1 << rank, weights - base, size, 0, NO_FLAG, 0);
            add_vector(batch, weights, size);
        }
        rows_at = (uint8_t *)SLICE(table, rank, OUT_ROWS) - base; /* equal in all regions */
    }
    for (i64 pass = 0; pass < 2; pass++) { /* counts, then writes */
        u64 *masks = NULL;
        memset(next, 0, sizeof next);
        if (pass) {
            add_frame(batch, ROWS, space, mask, num_rows ? rows_at : 0, num_rows, row_bytes, flag_offset, flag);
            masks = add_small(batch, num_rows * sizeof(u64));
        }
        num_rows = 0;
        for (i64 token = 0; token < num_tokens; token++) {
            u64 wanted = 0;
            for (i64 rank = 0; rank < num_ranks; rank++)
                if (TAKES_PART(mask, rank) && next[rank] < ex.num_rows[rank] &&
                    ex.tokens[rank * num_tokens + next[rank]] == token) {
                    wanted |= (u64)1 << rank;
                    next[rank]++;
                }
            if (!wanted)
                continue;
            if (pass) {
                masks[num_rows] = wanted;
                add_vector(batch, rows + token * row_bytes, row_bytes);
            }
            num_rows++;
        }
    }
    post(link, to, batch);
    pthread_mutex_unlock(&link->sending);
}

/* Sends rank `peer` of the host of rank `to` the results of its rows, from this rank's send buffer into the copy of it there, and
   where those of each slot begin. The send buffer must stay as it is until the rank has read them. */
void link_results(Link *link, i64 to, i64 space, i64 peer, const i64 *facts, i64 buffer, i64 num_tokens, i64 topk, i64 *block,
                  i64 flag_offset, i64 flag)
{
    i64 slots = facts[SLOTS], row_bytes = facts[RESULT_ROW_BYTES], rank = facts[RANK];
    const i64 *table = slice_table(facts, buffer);
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    uint8_t *send_buffer = SLICE(table, rank, SEND_BUFFER), *starts = SLICE(table, peer, OUT_STARTS);
    uint8_t **regions = link->spaces[space].regions;
    i64 num_pieces = facts[RANK_SUM] ? 1 : slots;
    pthread_mutex_lock(&link->sending);
    Batch *batch = new_batch(link, 2 * slots + 4, (slots + 2) * sizeof(Frame));
    batch->borrows = 1;
    for (i64 piece = 0; piece < num_pieces; piece++) {
        i64 first = facts[RANK_SUM] ? ((i64 *)starts)[0] : ex.starts[peer * slots + piece];
        i64 size = (facts[RANK_SUM] ? ex.rows_of[peer] : ex.arrived[peer * slots + piece]) * row_bytes;
        uint8_t *from = send_buffer + first * row_bytes;
        if (!size)
            continue;
        add_frame(batch, WRITE, space, (u64)1 << rank, from - regions[rank], size, 0, NO_FLAG, 0);
        add_vector(batch, from, size);
    }
    add_frame(batch, WRITE, space, (u64)1 << peer, starts - regions[peer], slots * sizeof(i64), 0, flag_offset, flag);
    add_vector(batch, starts, slots * sizeof(i64));
    post(link, to, batch);
    pthread_mutex_unlock(&link->sending);
}

/* --- receiving --- */

enum { HEAD, MASKS, DATA, IGNORED };

static int is_old(const Link *link, const Frame *frame)
{
    return frame->epoch != ANY_EPOCH && frame->epoch < link->oldest;
}

static int is_ignored(const Link *link, const Frame *frame)
{
    return is_old(link, frame) || (frame->epoch == ANY_EPOCH && !link->spaces[frame->space].is_shared);
}

static int valid(const Link *link, const Frame *frame)
{
    i64 size = frame->length;
    const Space *space = link->spaces + frame->space;
    if (frame->magic != MAGIC || (frame->kind != WRITE && frame->kind != ROWS) || frame->space >= MOST || frame->offset < 0 ||
        size < 0)
        return 0;
    if (frame->kind == ROWS) {
        if (!frame->row_bytes || size > (1 << 24) || frame->row_bytes > (1 << 30))
            return 0;
        size *= frame->row_bytes;
    }
    for (i64 rank = 0; rank < MOST; rank++) {
        if (!(frame->mask >> rank & 1) || is_ignored(link, frame))
            continue;
        if (!space->regions[rank] || frame->offset > space->sizes[rank] || size > space->sizes[rank] - frame->offset)
            return 0;
        if (frame->flag_offset != NO_FLAG && (frame->flag_offset < 0 || frame->flag_offset % sizeof(i64) ||
                                              frame->flag_offset > space->sizes[rank] - (i64)sizeof(i64)))
            return 0;
    }
    return 1;
}

/* Returns where the next byte of a frame goes, and in `room` how many may go there. */
static uint8_t *place(Link *link, Incoming *in, i64 *room)
{
    Frame *frame = &in->frame;
    uint8_t **regions = link->spaces[frame->space].regions;
    if (frame->kind == WRITE) {
        *room = frame->length - in->done;
        return regions[__builtin_ctzll(frame->mask)] + frame->offset + in->done;
    }
    i64 rank = __builtin_ctzll(in->masks[in->row]);
    *room = frame->row_bytes - in->done;
    return regions[rank] + frame->offset + in->counts[rank] * frame->row_bytes + in->done;
}

/* Takes note of bytes that lie in their place, copies what is whole to the other regions, and raises the flags. */
static void advance(Link *link, Incoming *in, i64 size)
{
    Frame *frame = &in->frame;
    uint8_t **regions = link->spaces[frame->space].regions;
    in->done += size;
    if (frame->kind == ROWS && in->row < frame->length && in->done == frame->row_bytes) {
        u64 wanted = in->masks[in->row];
        i64 first = __builtin_ctzll(wanted);
        const uint8_t *from = regions[first] + frame->offset + in->counts[first]++ * frame->row_bytes;
        for (wanted &= wanted - 1; wanted; wanted &= wanted - 1) {
            i64 rank = __builtin_ctzll(wanted);
            memcpy(regions[rank] + frame->offset + in->counts[rank]++ * frame->row_bytes, from, frame->row_bytes);
        }
        in->row++;
        in->done = 0;
    }
    if (frame->kind == ROWS ? in->row < frame->length : in->done < frame->length)
        return;
    if (frame->kind == WRITE && frame->length)
        for (u64 rest = frame->mask & (frame->mask - 1); rest; rest &= rest - 1)
            memcpy(regions[__builtin_ctzll(rest)] + frame->offset,
                   regions[__builtin_ctzll(frame->mask)] + frame->offset, frame->length);
    for (u64 rest = frame->mask; rest && frame->flag_offset != NO_FLAG; rest &= rest - 1)
        __atomic_store_n((i64 *)(regions[__builtin_ctzll(rest)] + frame->flag_offset), frame->flag,
                         __ATOMIC_RELEASE);
    in->state = HEAD;
}

/* Ignores the rest of a frame. */
static void ignore(Incoming *in)
{
    Frame *frame = &in->frame;
    i64 masks = frame->length * (i64)sizeof(u64), rows = frame->length - in->row;
    if (frame->kind == WRITE)
        in->done = frame->length - in->done;
    else if (in->state == MASKS)
        in->done = masks - in->done + rows * frame->row_bytes;
    else
        in->done = rows * frame->row_bytes - in->done;
    in->state = in->done ? IGNORED : HEAD;
}

/* Applies what lies in the buffer. Returns 0 where the peer sends what no peer of ours would. */
static int apply(Link *link, Incoming *in)
{
    for (;;) {
        i64 here = in->end - in->begin;
        const uint8_t *data = in->buffer + in->begin;
        if (in->state == HEAD) {
            if (here < (i64)sizeof(Frame))
                return 1;
            memcpy(&in->frame, data, sizeof(Frame));
            in->begin += sizeof(Frame);
            if (!in->frame.mask || !valid(link, &in->frame))
                return 0;
            in->row = in->done = 0;
            in->state = in->frame.kind == ROWS ? MASKS : DATA;
            if (is_ignored(link, &in->frame)) {
                ignore(in);
                continue;
            }
            if (in->frame.kind == ROWS) {
                memset(in->counts, 0, sizeof in->counts);
                if (in->num_masks < in->frame.length) {
                    in->num_masks = 2 * in->frame.length;
                    in->masks = realloc(in->masks, in->num_masks * sizeof(u64));
                }
            }
            if (!in->frame.length)
                advance(link, in, 0);
        } else if (in->state == MASKS) {
            i64 all = in->frame.length * sizeof(u64), size = all - in->done < here ? all - in->done : here;
            memcpy((uint8_t *)in->masks + in->done, data, size);
            in->begin += size;
            in->done += size;
            if (in->done < all)
                return 1;
            for (i64 row = 0; row < in->frame.length; row++)
                if (!in->masks[row] || in->masks[row] & ~in->frame.mask)
                    return 0;
            in->done = 0;
            in->state = DATA;
        } else if (in->state == IGNORED) {
            i64 size = in->done < here ? in->done : here;
            in->begin += size;
            in->done -= size;
            if (in->done)
                return 1;
            in->state = HEAD;
        } else {
            i64 room, size;
            if (!here)
                return 1;
            uint8_t *to = place(link, in, &room);
            size = room < here ? room : here;
            memcpy(to, data, size);
            in->begin += size;
            advance(link, in, size);
        }
    }
}

/* Receives the data of a large frame where they go. Returns as recvmsg does. */
static ssize_t receive_in_place(Link *link, Incoming *in)
{
    struct iovec vectors[MOST_VECTORS];
    Frame *frame = &in->frame;
    i64 num = 1, room;
    vectors[0].iov_base = place(link, in, &room);
    vectors[0].iov_len = room;
    if (frame->kind == ROWS) {
        i64 counts[MOST];
        memcpy(counts, in->counts, sizeof counts);
        for (i64 row = in->row; row < frame->length && num < MOST_VECTORS; row++) {
            for (u64 wanted = in->masks[row]; wanted && row > in->row; wanted = 0) {
                i64 rank = __builtin_ctzll(wanted);
                vectors[num].iov_base = link->spaces[frame->space].regions[rank] + frame->offset + counts[rank] * frame->row_bytes;
                vectors[num++].iov_len = frame->row_bytes;
            }
            for (u64 wanted = in->masks[row]; wanted; wanted &= wanted - 1)
                counts[__builtin_ctzll(wanted)]++;
        }
    }
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = num};
    ssize_t size = recvmsg(in->fd, &message, MSG_DONTWAIT);
    for (ssize_t left = size; left > 0;) {
        i64 part;
        place(link, in, &part);
        part = part < left ? part : left;
        advance(link, in, part);
        left -= part;
    }
    return size;
}

/* Takes in what has come. Returns the bytes. */
static i64 pull(Link *link, Incoming *in)
{
    i64 all = 0;
    int error = 0;
    while (in->fd >= 0 && !error) {
        ssize_t size;
        i64 left = 0;
        if (in->state == DATA && in->begin == in->end)
            left = in->frame.kind == WRITE ? in->frame.length - in->done
                                           : (in->frame.length - in->row) * in->frame.row_bytes - in->done;
        if (left >= DIRECT_BYTES)
            size = receive_in_place(link, in);
        else {
            memmove(in->buffer, in->buffer + in->begin, in->end - in->begin);
            in->end -= in->begin;
            in->begin = 0;
            size = recv(in->fd, in->buffer + in->end, BUFFER_BYTES - in->end, MSG_DONTWAIT);
            if (size > 0) {
                in->end += size;
                if (!apply(link, in))
                    error = EPROTO;
            }
        }
        if (size == 0)
            error = ECONNRESET;
        else if (size < 0 && errno != EINTR) {
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                error = errno;
            break;
        } else if (size > 0) {
            all += size;
            if (size < BUFFER_BYTES / 2 && left < DIRECT_BYTES)
                break; /* most likely there is no more; one system call saved */
        }
    }
    if (error) {
        epoll_ctl(link->epoll, EPOLL_CTL_DEL, in->fd, NULL);
        in->fd = -1;
        end(link, in - link->in, error);
    }
    in->received += all;
    return all;
}

/* Ignores what is left of frames of epochs before this one, and all that come. */
static void ignore_before(Link *link, i64 epoch)
{
    if (link->oldest >= epoch)
        return;
    link->oldest = epoch;
    for (i64 rank = 0; rank < link->num_ranks; rank++) {
        Incoming *in = link->in + rank;
        if (in->fd >= 0 && (in->state == DATA || in->state == MASKS) && is_old(link, &in->frame))
            ignore(in);
    }
}

static i64 progress(Link *link)
{
    i64 bytes = 0;
    Guard *guard = link->guard;
    if (!pthread_mutex_trylock(&link->receiving)) {
        if (guard) { /* either link_fence sees that this rank applies frames, or this rank sees its epoch */
            __atomic_store_n(&guard->is_applying, 1, __ATOMIC_SEQ_CST);
            ignore_before(link, __atomic_load_n(&guard->oldest, __ATOMIC_SEQ_CST));
        }
        for (i64 rank = 0; rank < link->num_ranks; rank++)
            bytes += pull(link, link->in + rank);
        if (guard)
            __atomic_store_n(&guard->is_applying, 0, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&link->receiving);
    }
    if (!pthread_mutex_trylock(&link->sending)) {
        post_later(link);
        for (i64 rank = 0; rank < link->num_ranks; rank++)
            if (link->out[rank].head)
                bytes += push(link, link->out + rank);
        pthread_mutex_unlock(&link->sending);
    }
    if (bytes)
        __atomic_store_n(&link->busy_ns, now_ns(), __ATOMIC_RELAXED);
    return bytes;
}

/* Called by who waits. Returns the bytes that were moved. */
i64 link_poll(Link *link)
{
    __atomic_store_n(&link->polled_ns, now_ns(), __ATOMIC_RELAXED);
    return progress(link);
}

/* Returns how many batches were posted so far. */
i64 link_posted(Link *link)
{
    pthread_mutex_lock(&link->sending);
    i64 num = link->num_posted;
    pthread_mutex_unlock(&link->sending);
    return num;
}

/* Returns the first rank, counted from 1, whose connection has not taken all of the first `num` batches; 0: none. */
i64 link_unsent(Link *link, i64 num)
{
    i64 found = 0;
    pthread_mutex_lock(&link->sending);
    for (i64 rank = MOST - 1; rank >= 0; rank--) {
        push(link, link->out + rank);
        if (link->out[rank].head && link->out[rank].head->number < num)
            found = rank + 1;
    }
    pthread_mutex_unlock(&link->sending);
    return found;
}

static int has_unsent(Link *link)
{
    int found = 0;
    pthread_mutex_lock(&link->sending);
    for (i64 rank = 0; rank < link->num_ranks; rank++)
        found |= link->out[rank].head && link->out[rank].fd >= 0;
    pthread_mutex_unlock(&link->sending);
    return found;
}

/* How many bytes must have come before epoll tells the thread. */
static void set_low(Link *link, int bytes)
{
    if (link->low == bytes)
        return;
    lock(link);
    link->low = bytes;
    for (i64 rank = 0; rank < link->num_ranks; rank++)
        if (link->sockets[rank] >= 0)
            setsockopt(link->sockets[rank], SOL_SOCKET, SO_RCVLOWAT, &link->low, sizeof link->low);
    unlock(link);
}

/* Sends and takes in while this rank computes. It sleeps while little has come: a wake-up takes tens of microseconds of the
   core that computes, and what goes to several ranks of a host is for this one too, which takes it in when it waits. */
static void *run(void *argument)
{
    Link *link = argument;
    struct timespec pause = {0, PAUSE_NS};
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    prctl(PR_SET_NAME, "link between hosts", 0, 0, 0);
    while (!__atomic_load_n(&link->ends, __ATOMIC_RELAXED)) {
        struct epoll_event event;
        u64 count;
        int is_idle = now_ns() - __atomic_load_n(&link->busy_ns, __ATOMIC_RELAXED) > ACTIVE_NS;
        set_low(link, is_idle ? 1 : LOW_BYTES);
        int found = epoll_wait(link->epoll, &event, 1, is_idle ? 1000 : LOOK_MS);
        if (found > 0 && event.data.fd == link->wake && read(link->wake, &count, sizeof count) < 0)
            continue;
        if (is_idle)
            __atomic_store_n(&link->busy_ns, now_ns(), __ATOMIC_RELAXED);
        do {
            if (now_ns() - __atomic_load_n(&link->polled_ns, __ATOMIC_RELAXED) > PAUSE_NS)
                progress(link);
            else if (found > 0)
                nanosleep(&pause, NULL);
        } while (!__atomic_load_n(&link->ends, __ATOMIC_RELAXED) && has_unsent(link) && !nanosleep(&pause, NULL));
    }
    return NULL;
}

/* --- connections and epochs --- */

Link *link_new(void)
{
    Link *link = calloc(1, sizeof(Link));
    pthread_mutex_init(&link->sending, NULL);
    pthread_mutex_init(&link->receiving, NULL);
    for (i64 rank = 0; rank < MOST; rank++) {
        link->out[rank].fd = link->in[rank].fd = link->sockets[rank] = -1;
        link->errors[rank] = ENOTCONN;
        link->expected[rank] = 1;
    }
    link->epoll = epoll_create1(EPOLL_CLOEXEC);
    link->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    link->news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = link->wake};
    epoll_ctl(link->epoll, EPOLL_CTL_ADD, link->wake, &event);
    return link;
}

/* Takes over a connection with a rank, which replaces the one before. What that one has not sent is dropped. */
void link_attach(Link *link, i64 rank, i64 fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.fd = fd};
    lock(link);
    Outgoing *out = link->out + rank;
    Incoming *in = link->in + rank;
    if (link->sockets[rank] >= 0)
        close(link->sockets[rank]); /* also leaves epoll */
    if (link->generations[rank] >= link->expected[rank])
        drop_all(link, out);
    if (!in->buffer)
        in->buffer = malloc(BUFFER_BYTES);
    in->begin = in->end = 0;
    in->state = HEAD;
    link->sockets[rank] = out->fd = in->fd = fd;
    __atomic_store_n(link->errors + rank, 0, __ATOMIC_RELEASE);
    __atomic_add_fetch(link->generations + rank, 1, __ATOMIC_ACQ_REL);
    if (link->num_ranks <= rank)
        link->num_ranks = rank + 1;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &link->low, sizeof link->low);
    epoll_ctl(link->epoll, EPOLL_CTL_ADD, fd, &event);
    push(link, out);
    unlock(link);
    add_one(link->wake); /* data may have come before epoll knew of the connection */
}

/* Leaves all epochs before this one: returns once none of their frames is applied any more. */
void link_void(Link *link, i64 epoch)
{
    lock(link);
    ignore_before(link, epoch);
    for (i64 rank = 0; rank < MOST; rank++) {
        Outgoing *out = link->out + rank;
        if (link->epoch < link->oldest)
            out->num_later = 0;
        if (link->errors[rank] && out->fd >= 0) { /* what is posted from now on waits for the next connection */
            out->fd = -1;
            drop_all(link, out);
        }
        if (out->head && out->head->has_begun && out->head->borrows && out->head->epoch < link->oldest) {
            out->fd = -1;
            end(link, rank, ECANCELED);
            drop_all(link, out);
        }
        Batch **at = &out->head;
        out->tail = NULL;
        for (Batch *batch; (batch = *at);)
            if (batch->epoch < link->oldest && !batch->has_begun) {
                *at = batch->next;
                give_back(link, batch);
            } else {
                out->tail = batch;
                at = &batch->next;
            }
    }
    unlock(link);
}

/* Lets ranks of this host see to it that this one takes in no frames of an epoch that they leave without it. */
void link_guard(Link *link, Guard *own)
{
    lock(link);
    own->is_applying = 0; /* a process that was killed may have left it */
    link->guard = own;
    unlock(link);
}

/* Returns whether a rank of this host takes in no more frames of epochs before this one, whatever it does. */
i64 link_fence(Guard *of, i64 epoch)
{
    i64 oldest = __atomic_load_n(&of->oldest, __ATOMIC_SEQ_CST);
    while (oldest < epoch &&
           !__atomic_compare_exchange_n(&of->oldest, &oldest, epoch, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
    return !__atomic_load_n(&of->is_applying, __ATOMIC_SEQ_CST);
}

/* Begins an epoch: its frames are lost where a connection ends that stands now, or the first one after now. */
void link_begin_epoch(Link *link, i64 epoch)
{
    link_void(link, epoch);
    lock(link);
    link->epoch = epoch;
    for (i64 rank = 0; rank < MOST; rank++)
        link->expected[rank] = link->generations[rank] + (link->errors[rank] != 0);
    unlock(link);
}

void link_region(Link *link, i64 space, i64 rank, uint8_t *base, i64 size)
{
    lock(link);
    link->spaces[space].regions[rank] = base;
    link->spaces[space].sizes[rank] = size;
    link->spaces[space].is_shared = 1;
    unlock(link);
}

/* Returns 0, or an error number. */
i64 link_start(Link *link)
{
    int error = pthread_create(&link->thread, NULL, run, link);
    link->has_thread = !error;
    return error;
}

/* Returns why there is no connection with a rank, as an error number; 0: there is one. */
i64 link_error(Link *link, i64 rank) { return __atomic_load_n(link->errors + rank, __ATOMIC_ACQUIRE); }

/* Returns how many connections with a rank there have been. */
i64 link_generation(Link *link, i64 rank) { return __atomic_load_n(link->generations + rank, __ATOMIC_ACQUIRE); }

/* Returns whether frames of this epoch may be lost: a connection with the rank has ended since it began. */
i64 link_broken(Link *link, i64 rank)
{
    i64 left = link_generation(link, rank) - link->expected[rank];
    return left > 0 || (!left && link_error(link, rank));
}

/* Returns how often in a row the kernel has sent data of a connection again, and had no answer. */
i64 link_resent(Link *link, i64 rank)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    lock(link);
    if (link->errors[rank] || getsockopt(link->sockets[rank], IPPROTO_TCP, TCP_INFO, &info, &size))
        info.tcpi_retransmits = 0;
    unlock(link);
    return info.tcpi_retransmits;
}

/* Returns the bytes given to the connection with a rank that have not gone out yet, neither from here nor from the kernel. */
i64 link_queued(Link *link, i64 rank)
{
    Outgoing *out = link->out + rank;
    i64 all = 0;
    int in_kernel = 0;
    pthread_mutex_lock(&link->sending);
    for (Batch *batch = out->head; batch; batch = batch->next)
        for (i64 vector = batch->first; vector < batch->num; vector++)
            all += batch->vectors[vector].iov_len;
    if (out->fd >= 0 && !ioctl(out->fd, SIOCOUTQNSD, &in_kernel))
        all += in_kernel;
    pthread_mutex_unlock(&link->sending);
    return all;
}

/* Returns a descriptor that can be read once a connection has ended. */
i64 link_news(Link *link) { return link->news; }
i64 link_bytes(Link *link, i64 rank) { return __atomic_load_n(&link->out[rank].sent, __ATOMIC_RELAXED); }

/* Ends the thread and the connections, and frees everything. */
void link_free(Link *link)
{
    __atomic_store_n(&link->ends, 1, __ATOMIC_RELAXED);
    add_one(link->wake);
    if (link->has_thread)
        pthread_join(link->thread, NULL);
    for (i64 rank = 0; rank < MOST; rank++) {
        if (link->sockets[rank] >= 0)
            close(link->sockets[rank]);
        drop_all(link, link->out + rank);
        free(link->in[rank].buffer);
        free(link->in[rank].masks);
    }
    for (Batch *batch = link->spare, *next; batch; batch = next) {
        next = batch->next;
        free(batch->vectors);
        free(batch->small);
        free(batch);
    }
    close(link->epoll);
    close(link->wake);
    close(link->news);
    free(link);
}
