/* Frames between hosts (moe_serve/dispatch/hosts/link.c, link.py), under all schedules. For SPIN.

   SENDER sends calls to another host, where READER reads them; two are in flight. What it sends goes to the rank there that
   is its entry in this epoch, ENTRY or READER itself, and that one writes it into READER's region. A call is a batch of
   two frames: a head, then rows, with the flag behind them. The second one is its header and its data.

   The connection with ENTRY takes a few of them at once, so it may end anywhere in a batch: once by itself, and where a
   void step has to cut it. A new one follows; each end takes it over when it comes to that. ENTRY may stop anywhere, be
   masked, wake, and rejoin. READER may void a step without a reason; which ranks propose an epoch, and with
   which entry, is the same for all (votes.pml, regroup.pml). The memory that SENDER sends from changes as soon as it has
   left the epoch. The connection with READER takes all at once and does not end; acknowledgements are never lost.

   Mistakes, each of which must be caught: FLAG_FIRST a flag is raised when its frame begins; RESUMED what is left of a
   batch goes over the next connection; KEPT_STATE the receiver goes on with a frame over the next connection; TAKES_OLD a
   rank that has left an epoch takes in frames of it; NO_FENCE a masked neighbour is not kept from writing; LATE_WORD it
   looks at its guard before it says that it writes; NOT_CUT a frame that has begun goes on when the step is void. */

#define SENDER 0
#define ENTRY 1
#define READER 2
#define VALUE(n) (epoch * 16 + (n)) /* of data, and of the flag */
#define EPOCH_OF(value) ((value) >> 4)
#define BUFFER(value) ((value) % BUFFERS)
#define GENERATIONS (EPOCHS + 1)
#define LEFT(rank) (proposed[rank] > epoch)

#define NONE 0 /* what a receiver is at */
#define HEAD 1
#define ROWS 2
#define DATA 3
#define IGNORED 4

chan wire[GENERATIONS] = [ROOM] of { byte, byte }; /* connections with ENTRY */
chan direct = [3 * CALLS * EPOCHS] of { byte, byte };       /* the one with READER */
chan queue = [3 * CALLS] of { byte, byte }; /* what SENDER has posted; DATA with the number of their memory */
bool has_ended[GENERATIONS];
byte out, part;         /* SENDER's connection; frames and data of the first batch that have gone */
bool is_down, awaits;   /* that one has ended;  batches wait for the first one of this epoch */
bool is_broken[2];      /* SENDER, ENTRY: a connection of this epoch has ended */
byte memory[BUFFERS];

byte head[BUFFERS], rows[BUFFERS], flag[BUFFERS]; /* READER's region */
byte acknowledged;
byte fence;             /* ENTRY's guard: the oldest epoch that it may take in */
bool applies, is_dead;

byte proposed[3];
bool without[EPOCHS + 2]; /* ENTRY, in an epoch */
byte entry[EPOCHS + 2];
bool has_suspected, has_reset;

#define OLD(value) (EPOCH_OF(value) < oldest)

#define GO_ON if :: me == ENTRY && is_dead -> goto end_of_all :: else fi

inline leave_epoch(before) {
#ifdef TAKES_OLD
    skip
#else
    oldest = (oldest < before -> before : oldest);
    if
    :: doing == ROWS && OLD(frame) -> doing = IGNORED
    :: else
    fi
#endif
}

/* Takes in one part of what a connection brings. */
inline take(its) {
    atomic {
        GO_ON;
        its?kind, value;
        if
        :: doing == NONE && kind == HEAD && !OLD(value) -> head[BUFFER(value)] = value
        :: doing == NONE && kind == HEAD && OLD(value)
        :: doing == NONE && kind != HEAD ->
            frame = value;
            doing = (OLD(value) -> IGNORED : kind);
#ifdef FLAG_FIRST
            flag[BUFFER(frame)] = frame
#endif
        :: doing == IGNORED -> doing = NONE; frame = 0
        :: doing == ROWS -> rows[BUFFER(frame)] = (kind == DATA -> value : 0); doing = DATA
        fi;
        kind = 0; value = 0
    }
    if
    :: doing == DATA -> atomic { GO_ON; flag[BUFFER(frame)] = frame; doing = NONE; frame = 0 }
    :: else
    fi
}

/* Whoever leaves an epoch first says how all go on. */
inline choose() {
    if
    :: entry[epoch + 1]
    :: else ->
        if
        :: me != ENTRY -> without[epoch + 1] = true; entry[epoch + 1] = READER
        :: !is_dead -> entry[epoch + 1] = ENTRY
        :: !is_dead -> entry[epoch + 1] = READER
        fi
    fi
}

#define ALL_LEFT (LEFT(SENDER) && LEFT(READER) && (without[epoch + 1] || LEFT(ENTRY)))

/* Waits for a condition, or leaves the epoch. */
#define WAIT(condition) if :: condition :: !(condition) && (LEFT(SENDER) || LEFT(ENTRY) || LEFT(READER)) -> goto left fi

inline drop_all() {
    do
    :: queue?_, _
    :: empty(queue) -> break
    od;
    part = 0
}

inline post(n) {
    atomic {
        memory[BUFFER(n)] = VALUE(n);
        if
        :: entry[epoch] == READER ->
            direct!HEAD, VALUE(n); direct!ROWS, VALUE(n); direct!DATA, VALUE(n)
        :: entry[epoch] == ENTRY && (!is_down || awaits) ->
            queue!HEAD, VALUE(n); queue!ROWS, VALUE(n); queue!DATA, BUFFER(n)
        :: else /* lost, which is seen */
        fi
    }
}

proctype sender(byte me)
{
    byte epoch = 1, n, kind, value;
again:
    n = 1;
    do
    :: n <= CALLS ->
        if
        :: n > BUFFERS -> atomic { WAIT(acknowledged >= VALUE(n - BUFFERS) || is_broken[SENDER]); if :: is_broken[SENDER] -> goto left :: else fi }
        :: else
        fi;
        post(n);
        n++
    :: else -> break
    od;
    atomic { WAIT(acknowledged >= VALUE(CALLS) || is_broken[SENDER]); if :: is_broken[SENDER] -> goto left :: else fi }
end_of_calls:
    (LEFT(ENTRY) || LEFT(READER) || is_broken[SENDER]);
left:
    atomic { /* link_void */
        n = 0;
#ifdef NOT_CUT
        if
        :: part -> /* the rest of this batch alone is left */
            n = part;
            do
            :: n < 3 -> queue?kind, value; n++; queue!kind, value
            :: else -> break
            od;
            do
            :: len(queue) > 3 - part -> queue?_, _
            :: else -> break
            od;
            kind = 0; value = 0
        :: else -> drop_all()
        fi;
#else
        if
        :: part -> has_ended[out] = true; is_down = true
        :: else
        fi;
        drop_all();
#endif
        n = 0; memory[0] = 0; memory[1] = 0
    }
    atomic { choose(); proposed[me] = epoch + 1 }
    if
    :: epoch < EPOCHS
    :: else -> goto end_of_all
    fi;
    atomic { ALL_LEFT -> epoch++; awaits = is_down; is_broken[SENDER] = false; goto again }
end_of_all:
    skip
}

/* The connection with ENTRY, as SENDER has it: a thread of its own. */
proctype connection()
{
    byte kind, value;
end_of_connection:
    do
    :: atomic { /* push */
        nempty(queue) && !is_down && !has_ended[out] && nfull(wire[out]) ->
            queue?kind, value;
            wire[out]!kind, (kind == DATA -> memory[value] : value);
            part = (part + 1) % 3; kind = 0; value = 0
        }
    :: atomic { !is_down && has_ended[out] -> /* seen, at the latest when it pushes */
            is_down = true; is_broken[SENDER] = true;
#ifndef RESUMED
            drop_all()
#endif
        }
    :: atomic { is_down && out + 1 < GENERATIONS -> /* link_attach */
            out++; is_down = false;
#ifndef RESUMED
            if
            :: awaits
            :: else -> drop_all()
            fi;
#endif
            awaits = false
        }
    :: atomic { !has_reset && !entry[EPOCHS] -> has_reset = true; has_ended[out] = true }
    od
}

proctype taker(byte me)
{
    byte epoch = 1, from, doing, frame, oldest, kind, value;
    bool waits;
end_of_taker:
    do
    :: nempty(wire[from]) -> /* a turn of `progress`; data that lie in the kernel of a connection that has ended come, or not */
#ifdef LATE_WORD
        atomic { leave_epoch(fence) }
        applies = true;
        take(wire[from]);
#else
        applies = true;
        atomic { leave_epoch(fence) }
        take(wire[from]);
#endif
        applies = false
    :: atomic { from < out || has_ended[from] && from + 1 < GENERATIONS ->
            is_broken[ENTRY] = true;
            do
            :: wire[from]?_, _
            :: empty(wire[from]) -> break
            od;
            from++;
#ifndef KEPT_STATE
            doing = NONE
#endif
        }
    :: atomic { !waits && (LEFT(SENDER) || LEFT(READER) || is_broken[ENTRY]) && !without[epoch] ->
            choose(); leave_epoch(epoch + 1); proposed[me] = epoch + 1; waits = true
        }
    :: atomic { without[epoch] && epoch < EPOCHS && (LEFT(SENDER) || LEFT(READER)) -> /* it knows that it is masked */
            if
            :: without[epoch + 1] -> epoch++
            :: else -> leave_epoch(epoch + 1); proposed[me] = epoch + 1; waits = true
            fi
        }
    :: atomic { waits && ALL_LEFT && epoch < EPOCHS -> epoch++; waits = false; is_broken[ENTRY] = false }
    od;
end_of_all:
    skip
}

proctype reader(byte me)
{
    byte epoch = 1, n, doing, frame, oldest, kind, value;
again:
    n = 1;
    do
    :: n <= CALLS ->
        do
        :: nempty(direct) -> take(direct)
        :: flag[BUFFER(n)] == VALUE(n) -> break
        :: flag[BUFFER(n)] != VALUE(n) && (LEFT(SENDER) || LEFT(ENTRY)) -> goto left
        :: !has_suspected && epoch < EPOCHS -> has_suspected = true; goto left
        od;
        atomic { assert(head[BUFFER(n)] == VALUE(n) && rows[BUFFER(n)] == VALUE(n)); acknowledged = VALUE(n); n++ }
    :: else -> break
    od;
end_of_calls:
    (LEFT(SENDER) || LEFT(ENTRY));
left:
    n = 0;
    atomic { choose(); leave_epoch(epoch + 1) }
#ifndef NO_FENCE
    if
    :: without[epoch + 1] ->
        fence = epoch + 1;
        if
        :: !applies
        :: applies -> is_dead = true /* it was stopped there, and is killed */
        fi
    :: else
    fi;
#endif
    proposed[me] = epoch + 1;
    if
    :: epoch < EPOCHS
    :: else -> goto end_of_all
    fi;
    atomic { ALL_LEFT -> epoch++; goto again }
end_of_all:
    skip
}

init
{
    atomic {
        entry[1] = ENTRY; proposed[SENDER] = 1; proposed[ENTRY] = 1; proposed[READER] = 1;
        run sender(SENDER); run connection(); run taker(ENTRY); run reader(READER)
    }
}
