/* Calls over shared memory (moe_serve/dispatch/shm: channel.py, transport.py, counts.py), under all schedules. For SPIN.

   Counts and rows are pushed into the receiver's region, results are pulled from the sender's. A flag and an
   acknowledgement are stored after what they tell of. The order of a rank's calls is PROGRAM (from ep/moe_layer.py), the
   numbers of buffers and of calls in flight are the code's: test_protocols.py writes both.

   The last rank may stop anywhere, for good or for a while. Others may give it up wherever they miss it; they show the
   next epoch on their pages, and once all but the lost rank have, they begin anew without it (regroup.pml has how they
   agree). It finds that out wherever it waits and after it has read results, and comes back as soon as it has.

   A data store, and a rank's stores of one flag for all peers, are one step each: a peer cannot tell earlier ones from its
   own delay. Those of the rank that may stop are steps of their own.

   Mistakes, each of which must be caught: FLAG_FIRST a flag before its data; NO_ACK a buffer is written without asking;
   EARLY_ACK rows are acknowledged before they are read; UNCHECKED results are used without a look at the others' pages;
   KEPT_FLAGS flags without an epoch. */

#define LOST (R - 1)
#define COUNTS 0
#define ROWS 1
#define RESULTS 2
#define SLICE(ch, to, from, buffer) ((((ch) * R + (to)) * R + (from)) * BUFFERS + (buffer))
#define ACK(ch, at, of) (((ch) * R + (at)) * R + (of))
#define OTHER(r) ((r) != me && IN(r))
#ifdef KEPT_FLAGS
#define FLAG(n) (n)
#else
#define FLAG(n) (epoch * 16 + (n))
#endif
#define IN(r) (members >> (r) & 1)
#define ALL ((1 << R) - 1)
#define VALUE(n) (epoch * 16 + (n)) /* of data */

byte flag[3 * R * R * BUFFERS];    /* what each source has announced in a rank's region */
byte data[2 * R * R * BUFFERS];    /* counts and rows there */
byte made[R * BUFFERS];            /* results in the send buffer of a rank */
byte ack[3 * R * R];               /* [call, in the region of, by]: the last one that was read */
byte proposed[R];                  /* epochs, on the pages */
bool returns;                      /* the lost rank asks to come back */
byte joined, ready;                /* epoch in which it is taken back; ranks that are ready for it */

#ifdef RECORDED
/* Events of a run, EACH of every rank in their order, and how many of each rank had ended before one of them began. Nothing
   else may happen; only what overlapped may happen in either order. */
byte recorded[R * EACH] = { RECORDED };
byte ended[R * EACH * R] = { ENDED };
byte at[R];
#define NEXT (me * EACH + at[me])
#define AFTER(r) (at[r] >= ended[NEXT * R + (r)])
#define EVENT(kind, ch, n) at[me] < EACH && recorded[NEXT] == kind * 16 + ch * 4 + (n) - 1 && AFTER(0) && AFTER(1) && AFTER(R - 1) -> at[me]++
#else
#define EVENT(kind, ch, n) true
#endif
#define WRITES 0
#define RAISES 1
#define SEES 2
#define READS 3

#define HAS(ch, r, n) (!OTHER(r) || flag[SLICE(ch, me, r, (n) % BUFFERS)] == FLAG(n))
#define READ_BY(ch, r, n) (!OTHER(r) || ack[ACK(ch, me, r)] >= FLAG(n))
#define LEFT(r) (OTHER(r) && proposed[r] > epoch)
#define FREE(ch, n) (FREE_OF(ch, 0, n) && FREE_OF(ch, 1, n) && FREE_OF(ch, R - 1, n))
#ifdef NO_ACK
#define FREE_OF(ch, r, n) true
#else
#define FREE_OF(ch, r, n) ((n) <= BUFFERS || READ_BY(ch, r, (n) - BUFFERS))
#endif
#define ARRIVED(ch, n) (HAS(ch, 0, n) && HAS(ch, 1, n) && HAS(ch, R - 1, n))
#define VOID (LEFT(0) || LEFT(1) || LEFT(R - 1))
#define MISSES(missing) (MAY_LOSE && epoch == 0 && me != LOST && IN(LOST) && missing)

/* Waits for a condition. Who sees that its epoch is over leaves it, and so does who gives the lost rank up. */
#define WAIT(condition, missing) if :: condition :: !(condition) && VOID -> goto left :: !(condition) && MISSES(missing) -> goto left fi

#define OWN_READ(n) ((n) <= added + BUFFERS)

inline write(ch, n) {
    atomic {
        r = 0;
        do
        :: r < R ->
            if
            :: OTHER(r) && ch != RESULTS -> data[SLICE(ch, r, me, (n) % BUFFERS)] = VALUE(n)
            :: else
            fi;
            r++
        :: else -> break
        od;
        if
        :: ch == RESULTS && !early[(n) % BUFFERS] -> made[me * BUFFERS + (n) % BUFFERS] = VALUE(n)
        :: else
        fi;
        r = 0
    }
}

inline raise(ch, n) {
    if
    :: MAY_LOSE && me == LOST -> /* some may have its flag, and some not */
        r = 0;
        do
        :: r < LOST -> flag[SLICE(ch, r, me, (n) % BUFFERS)] = FLAG(n); r++
        :: else -> break
        od;
        r = 0
    :: else ->
        atomic {
            r = 0;
            do
            :: r < R && OTHER(r) -> flag[SLICE(ch, r, me, (n) % BUFFERS)] = FLAG(n); r++
            :: r < R && !OTHER(r) -> r++
            :: else -> break
            od;
            r = 0
        }
    fi
}

inline acknowledge(ch, n) {
    r = 0;
    do
    :: r < R && OTHER(r) -> ack[ACK(ch, r, me)] = FLAG(n); r++
    :: r < R && !OTHER(r) -> r++
    :: else -> break
    od;
    r = 0
}

inline read(ch, n) {
    r = 0;
    do
    :: r < R && OTHER(r) ->
        if
        :: ch == RESULTS -> value[r] = made[r * BUFFERS + (n) % BUFFERS]
        :: else -> value[r] = data[SLICE(ch, me, r, (n) % BUFFERS)]
        fi;
        r++
    :: r < R && !OTHER(r) -> value[r] = VALUE(n); r++
    :: else -> break
    od;
    r = 0
}

#define RIGHT(n) (value[0] == VALUE(n) && value[1] == VALUE(n) && value[R - 1] == VALUE(n))

inline send(ch, n) {
    atomic { WAIT(FREE(ch, n), !FREE_OF(ch, LOST, n)); EVENT(WRITES, ch, n);
#ifdef FLAG_FIRST
    } raise(ch, n); write(ch, n);
#else
    write(ch, n) }
    atomic { EVENT(RAISES, ch, n); raise(ch, n) }
#endif
}

inline receive(ch, n) {
    atomic { WAIT(ARRIVED(ch, n), !HAS(ch, LOST, n)); EVENT(SEES, ch, n) }
#ifdef EARLY_ACK
    atomic { acknowledge(ch, n) }
    atomic { read(ch, n); assert(RIGHT(n)) }
#else
    atomic { EVENT(READS, ch, n); atomic { read(ch, n); assert(RIGHT(n)); acknowledge(ch, n) } }
#endif
    if
    :: ch == ROWS -> /* the send buffer is reserved for the experts if it is free already */
        atomic { early[(n) % BUFFERS] = FREE(RESULTS, n) && OWN_READ(n) }
    :: else
    fi
}
inline compute(n) {
    atomic {
        if
        :: early[(n) % BUFFERS] -> made[me * BUFFERS + (n) % BUFFERS] = VALUE(n)
        :: else
        fi
    }
}

inline add(n) {
    atomic { WAIT(ARRIVED(RESULTS, n), !HAS(RESULTS, LOST, n)); EVENT(SEES, RESULTS, n) }
    atomic { read(RESULTS, n); value[me] = made[me * BUFFERS + (n) % BUFFERS] }
    atomic {
#ifndef UNCHECKED
        if
        :: VOID -> goto left
        :: else
        fi;
#endif
        assert(RIGHT(n));
        EVENT(READS, RESULTS, n);
        atomic { acknowledge(RESULTS, n); added = n }
    }
}

proctype rank(byte me)
{
    byte r, epoch, members = ALL, added, value[R];
    bool early[BUFFERS];
again:
    if
    :: epoch == 0 -> PROGRAM
    :: else -> NEXT_PROGRAM
    fi;
    goto done;
left:
    atomic { /* all proposals are the same here: without the lost rank, then with it */
        added = 0; r = 0;
        do
        :: r < BUFFERS -> early[r] = false; r++
        :: else -> break
        od;
        r = 0;
        do
        :: r < R -> value[r] = 0; r++
        :: else -> break
        od;
        r = 0;
        if
        :: me != LOST -> proposed[me] = epoch + 1
        :: else
        fi
    }
    if
    :: me == LOST -> /* it was masked: it ends what it was at, and asks */
        returns = true;
end_masked:
        joined -> epoch = joined; proposed[me] = epoch
    :: else ->
        (proposed[0] > epoch && (R == 2 || proposed[1] > epoch));
        atomic { epoch++; members = ALL & ~(1 << LOST) }
    fi;
    goto again;
done:
end_of_calls:
    if
    :: epoch == 0 && VOID -> goto left /* the next wait would see it */
    :: epoch == 1 && me != LOST && returns -> /* the step plan says when */
        ready++;
        (ready == R - 1);
        proposed[me] = 2; joined = 2;
        (proposed[0] == 2 && proposed[1] == 2 && proposed[LOST] == 2);
        atomic { epoch = 2; members = ALL; added = 0; early[0] = false; early[1] = false }
        goto again
    fi
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
#ifdef RECORDED
    (at[0] == EACH && at[1] == EACH && at[R - 1] == EACH);
    assert(false) /* fails where the recorded run is a path of this model */
#endif
}
