/* One epoch's vote of hosts (moe_serve/dispatch/votes.py), under all schedules. For SPIN.

   Ballots 1 ... B, each of one proposer that wants its own number. A message, once sent, may arrive never, late, and
   often: what was sent is a set that nothing leaves, and every proposer has asked for promises. A process of a host
   appends a request in one step and reads the log for the answer in a later one, so others may append between the two.
   One host may lose its log, once.

   -DHALF: half of the ranks are a quorum, also without the lowest one.  -DFORGETFUL: a host that has lost its log
   votes on. Each of these must be caught. */

#define H 3
#ifndef B
#define B 2
#endif
#ifndef LOST
#define LOST 0 /* the host that may lose its log */
#endif

byte weight[H];              /* ranks of a host; host 0 has the lowest */
byte accepts[B + 1];         /* sent, with this value; 0: not */
byte promised[H], in_ballot[H], value[H]; /* the fold of each log: promised and accepted ballot, accepted value */
byte incarnation[H];
byte promises[B + 1], accepted[B + 1];    /* hosts that have answered a ballot, as bits */
byte heard_ballot[B + 1], heard_value[B + 1]; /* the highest accepted ballot among the promises, and its value */
byte decided;

#define SEEN(hosts, host) ((hosts) >> (host) & 1)
#define SUM(hosts) (SEEN(hosts, 0) * weight[0] + SEEN(hosts, 1) * weight[1] + SEEN(hosts, 2) * weight[2])
#define ALL (weight[0] + weight[1] + weight[2])
#ifdef HALF
#define QUORUM(hosts) (2 * SUM(hosts) >= ALL)
#else
#define QUORUM(hosts) (2 * SUM(hosts) > ALL || (2 * SUM(hosts) == ALL && SEEN(hosts, 0)))
#endif
#ifdef FORGETFUL
#define COUNTS(host) true
#else
#define COUNTS(host) (incarnation[host] == 0)
#endif

active proctype world()
{
    byte b, h;
    d_step { weight[0] = W0; weight[1] = W1; weight[2] = W2; }
end:
    do
    :: atomic { /* an event of one ballot and one host */
        do
        :: b < B -> b++
        :: b > 0 -> break
        od;
        do
        :: h < H - 1 -> h++
        :: break
        od;
        if
        :: b > promised[h] -> promised[h] = b                                       /* appended */
        :: promised[h] == b && COUNTS(h) && !SEEN(promises[b], h) && !accepts[b] ->
            promises[b] = promises[b] | (1 << h);                                   /* read and answered */
            if
            :: in_ballot[h] > heard_ballot[b] -> heard_ballot[b] = in_ballot[h]; heard_value[b] = value[h]
            :: else
            fi
        :: !accepts[b] && QUORUM(promises[b]) ->
            accepts[b] = (heard_value[b] -> heard_value[b] : b)
        :: accepts[b] && b >= promised[h] && in_ballot[h] != b ->
            promised[h] = b; in_ballot[h] = b; value[h] = accepts[b]                 /* appended */
        :: in_ballot[h] == b && COUNTS(h) && !SEEN(accepted[b], h) ->
            accepted[b] = accepted[b] | (1 << h);                                   /* read and answered */
            if
            :: QUORUM(accepted[b]) ->
                assert(!decided || decided == accepts[b]);
                decided = accepts[b]
            :: else
            fi
        :: h == LOST && incarnation[h] == 0 ->
            incarnation[h] = 1; promised[h] = 0; in_ballot[h] = 0; value[h] = 0
        fi;
        b = 0; h = 0 }
    od
}
