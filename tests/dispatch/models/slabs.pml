/* One step of low-latency dispatch and combine on GPUs (moe_serve/dispatch/gpu), under all schedules. For SPIN.

   Rows and results are pushed, each with a flag of its own; counts are flags themselves. Flags hold the number of a round
   of their queue. The kernels of a rank run one after the other in the order PROGRAM (from ep/moe_layer.py), with QUEUES
   queues (gpu/region.py) used in turn; each source sends a row to all other ranks in a round; one rank may send none.

   At most once a wait ends at its deadline: its rank notes who is late, goes on to the end of the step, and the step is
   void for it. So the slow rank may be anywhere, also dead. Whatever a rank adds up in a step without a late peer is right,
   and nobody is late where no wait has ended.
   What a late rank adds up is never used, so results and ends of rounds for it are left out of the states, and once each rank is
   late or through, nothing that could be wrong is left and all end. Neither hides a mistake, and the states are few enough to
   look at all of them.
   NVSHMEM may deliver rows and flags of different rows in any order; none is sent before what lay there was read, so
   that makes no difference: asserted where no wait may end.

   Mistakes, each of which must be caught: FLAG_FIRST a flag before its row; NO_DONE a queue is used again without asking;
   ONE_QUEUE both handles have the same queue. */

#define SLOW (R - 1)
#define ALL ((1 << R) - 1)
#define STOP if :: ALL_SAFE -> goto through :: else fi
#ifdef ONE_QUEUE
#define QUEUE(n) 0
#define ROUND(n) (n)
#else
#define QUEUE(n) (((n) - 1) % QUEUES)
#define ROUND(n) (((n) - 1) / QUEUES + 1)
#endif
#define CAME(flag, n) (flag == ROUND(n))

/* In the region of a rank, by kind, source and queue: */
#define COUNT 0
#define ROW 1
#define RESULT 2
#define DONE 3
#define OF(kind, to, from, n) (((kind) * R + (to)) * R + (from)) * QUEUES + QUEUE(n)
byte flag[4 * R * R * QUEUES];
byte data[3 * R * R * QUEUES]; /* whether there is a row; rows and results: numbers of calls */
#if MAY_BE_LATE
#define IS_FREE(at) true
#define UNREAD(at, is_so) skip
#else
bool unread[3 * R * R * QUEUES];
#define IS_FREE(at) !unread[at]
#define UNREAD(at, is_so) unread[at] = is_so
#endif
bool has_waited; /* in vain: nobody does so first twice */
bool late[R];
byte got[R * QUEUES], wrong[R * QUEUES]; /* from whom a rank has rows, as bits, and which of them are wrong */
bool is_through[R]; /* a rank that was never late has ended its step */
#define IS_SAFE(r) (late[r] || is_through[r])
#define ALL_SAFE (MAY_BE_LATE && IS_SAFE(0) && IS_SAFE(1) && IS_SAFE(R - 1))
#define IS_UNUSED(kind, from, to) (late[to] && ((kind) >= RESULT || late[from]))

/* Waits for a flag of each peer that is due, or takes note of who is late. A wait that ends at its deadline has the flags of
   that moment, and whoever waits for long may as well come late: so nothing but the moment is left open here. */
#define IS_DUE(r) true
#define HAS_ROW(r) (flag[OF(COUNT, me, r, n)] == ROUND(n) && data[OF(COUNT, me, r, n)])
#define HAS_SENT(r) is_busy
#define MAY_SKIP(r) (MAY_BE_LATE && (late[r] || late[me] || ((r) == SLOW && !has_waited)))
#define READY(kind, r, DUE) ((r) == me || !DUE(r) || flag[OF(kind, me, r, n)] >= ROUND(n) || MAY_SKIP(r))
#define WAIT_EACH(kind, DUE) READY(kind, 0, DUE) && READY(kind, 1, DUE) && READY(kind, R - 1, DUE); note_late(kind, n, DUE(r))

inline note_late(kind, n, is_due) {
    r = 0; misses = false;
    do
    :: r < R && r != me && (is_due) ->
        has_waited = has_waited || flag[OF(kind, me, r, n)] < ROUND(n);
        misses = misses || !CAME(flag[OF(kind, me, r, n)], n);
        r++
    :: r < R && (r == me || !(is_due)) -> r++
    :: else -> break
    od;
    if
    :: misses && !late[me] -> late[me] = true; bad = false; forget_unused()
    :: else
    fi;
    misses = false; r = 0
}

inline forget_unused() {
    d_step {
        r = 0;
        do
        :: r < 4 * R * R * QUEUES && IS_UNUSED(r / (R * R * QUEUES), r / QUEUES % R, r / (R * QUEUES) % R) ->
            flag[r] = 0;
            if
            :: r < 3 * R * R * QUEUES -> data[r] = 0
            :: else
            fi;
            r++
        :: r < 4 * R * R * QUEUES && !IS_UNUSED(r / (R * R * QUEUES), r / QUEUES % R, r / (R * QUEUES) % R) -> r++
        :: else -> break
        od;
        r = 0;
        do
        :: r < R * QUEUES -> got[r] = got[r] & ~(1 << me); wrong[r] = wrong[r] & ~(1 << me); r++
        :: else -> break
        od;
        r = 0
    }
}

inline write(kind, n) {
    atomic {
        r = 0;
        do
        :: r < R && r != me && (has >> r & 1) && !IS_UNUSED(kind, me, r) ->
            assert(IS_FREE(OF(kind, r, me, n)));
            UNREAD(OF(kind, r, me, n), true);
            data[OF(kind, r, me, n)] = (kind == RESULT && (wrong[me * QUEUES + QUEUE(n)] >> r & 1) -> 0 : n);
            r++
        :: r < R && !(r != me && (has >> r & 1) && !IS_UNUSED(kind, me, r)) -> r++
        :: else -> break
        od;
        r = 0
    }
}

inline raise(kind, n, whom) {
    atomic {
        r = 0;
        do
        :: r < R && r != me && ((whom) >> r & 1) && !IS_UNUSED(kind, me, r) -> flag[OF(kind, r, me, n)] = ROUND(n); r++
        :: r < R && !(r != me && ((whom) >> r & 1) && !IS_UNUSED(kind, me, r)) -> r++
        :: else -> break
        od;
        r = 0
    }
}

#ifdef FLAG_FIRST
#define FIRST(kind, n) raise(kind, n, has)
#define SECOND(kind, n) write(kind, n)
#else
#define FIRST(kind, n) write(kind, n)
#define SECOND(kind, n) raise(kind, n, has)
#endif

inline dispatch(n) {
    atomic {
        STOP;
        r = 0;
        do
        :: r < R && r != me -> data[OF(COUNT, r, me, n)] = is_busy; flag[OF(COUNT, r, me, n)] = ROUND(n); r++
        :: r == me -> r++
        :: r == R -> break
        od;
        r = 0;
        has = (is_busy -> ALL & ~(1 << me) : 0);
        FIRST(ROW, n)
    }
    atomic { SECOND(ROW, n); has = 0 }
}

inline receive(n) {
    atomic { STOP; WAIT_EACH(COUNT, IS_DUE); WAIT_EACH(ROW, HAS_ROW) }
    atomic {
        got[me * QUEUES + QUEUE(n)] = 0; wrong[me * QUEUES + QUEUE(n)] = 0; r = 0;
        do
        :: r < R && r != me && !IS_UNUSED(RESULT, me, r) && CAME(flag[OF(COUNT, me, r, n)], n) && data[OF(COUNT, me, r, n)] && CAME(flag[OF(ROW, me, r, n)], n) ->
            got[me * QUEUES + QUEUE(n)] = got[me * QUEUES + QUEUE(n)] | 1 << r;
            UNREAD(OF(ROW, me, r, n), false);
            wrong[me * QUEUES + QUEUE(n)] = (data[OF(ROW, me, r, n)] != n -> wrong[me * QUEUES + QUEUE(n)] | 1 << r : wrong[me * QUEUES + QUEUE(n)]);
            r++
        :: else -> r++; if :: r >= R -> break :: else fi
        od;
        r = 0
    }
}

/* A result of a wrong row is wrong: 0. That all rows were read is said before the results come. */
inline answer(n) {
    atomic { STOP; raise(DONE, n, ALL); has = got[me * QUEUES + QUEUE(n)]; FIRST(RESULT, n) }
    atomic { SECOND(RESULT, n); has = 0; got[me * QUEUES + QUEUE(n)] = 0; wrong[me * QUEUES + QUEUE(n)] = 0 }
}

inline add(n) {
    atomic {
        if
        :: late[me]
        :: else -> WAIT_EACH(RESULT, HAS_SENT)
        fi
    }
    atomic {
        r = 0;
        do
        :: r < R && r != me && is_busy && !late[me] ->
            bad = bad || (!late[me] && CAME(flag[OF(RESULT, me, r, n)], n) && data[OF(RESULT, me, r, n)] != n);
            UNREAD(OF(RESULT, me, r, n), false);
            r++
        :: r < R && !(r != me && is_busy && !late[me]) -> r++
        :: else -> break
        od;
        r = 0;
#ifndef NO_DONE
        if
        :: late[me]
        :: else -> WAIT_EACH(DONE, IS_DUE)
        fi
#endif
    }
}

proctype rank(byte me)
{
    byte r, has;
    bool is_busy = true, bad, misses;
    if
    :: true
    :: me == R - 2 -> is_busy = false /* it never has a row for another rank */
    fi;
    PROGRAM;
through:
    atomic {
        assert(late[me] || !bad); /* end_step: a step in which nobody was late is used */
        assert(has_waited || !late[me]);
        is_through[me] = true;
        r = 0; has = 0;
    }
}

init
{
    byte i;
    atomic {
        do
        :: i < R -> run rank(i); i++
        :: else -> break
        od
    }
}
