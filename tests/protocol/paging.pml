/* The protocol of lib/device/paging_protocol.h in all interleavings: two groups, a server and an evictor.
 *
 * A step is one access to a shared word. Steps keep the orders that the protocol states; without a stated order, both
 * orders are tried. tests/unit/paging_protocol.sh runs the model in several settings, and once for each NO_.. below,
 * which removes one order, check or rule: spin must then find a failed assertion or a process that waits for ever.
 *
 *   BLOCKS, FRAMES, CELLS    how many blocks, frames, and requests that the ring holds
 *   GROUP1, GROUP2           (first block, second block, how many of them, writes, how often)
 *   READER                   (block, how often), replaces the second group: loads a little, also if the block is present
 *   SPURIOUS, FAILURES, GIVE_UPS    how many unneeded evictions, failed reads, and waits that a group gives up
 *   END                      the server may end at any time
 *   LIMIT                    bounds how often a block comes and goes, else groups take blocks from each other for ever
 *
 * A wait is a guard here and a poll in the protocol: it never blocks a group that could ask or pin. The model leaves out
 * hints, acquires that do not wait, and the inside of the ring, which tests/protocol/paging_orders.cpp runs. */
#ifndef SPURIOUS
#define SPURIOUS 0
#endif
#ifndef FAILURES
#define FAILURES 0
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 0
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#define NONE 255
#define GARBAGE 200

#define NOT_PRESENT 0
#define PRESENT 1
#define EVICTING 2
#define FAILED 3
#define IN_PLACE 4

#define ROWS 1
#define NEEDED 2
#define WAIT 3
#define FIRST 4
#define MAY_ASK(b, u) (kind[b] == NOT_PRESENT || (kind[b] == IN_PLACE && (u) > ROWS))
/* As token_allows(): several groups at a time if each of their blocks has a frame, or one group. */
#define ALLOWED(n) (token == 0 || token + n <= FRAMES / 2)
#define ASKED(g, u) ((g) * 8 + (u))
/* Follows all requests of a generation: its arrival was fenced. */
#define FENCED(g) ((g) * 8 + 7)

/* The protocol's words. kind and gen are one word, state: read and written in one step. */
byte kind[BLOCKS];
byte gen[BLOCKS] = 1;
byte asked[BLOCKS];
byte pins[BLOCKS];
bit takes[BLOCKS];  /* whether a group took it since the server last looked */
byte written[BLOCKS];
chan ring = [CELLS] of { byte, byte };
bit asleep, ended;
byte token, tickets, turn;  /* how many blocks; how many were drawn; the oldest that waits */

/* Private to the server. */
bit behind[BLOCKS];  /* a fence followed the copy of its bytes */
bit held[BLOCKS], need, used[FRAMES];
byte left = FRAMES, spurious = SPURIOUS, failures = FAILURES;

/* Memory holds versions of blocks. Each write makes a new version; every access must see shadow's. */
byte where[BLOCKS] = NONE;
byte frame[FRAMES] = GARBAGE;
byte store[BLOCKS], shadow[BLOCKS];

/* Models time: a group that looks for a block sees it before the block counts as forgotten. */
byte looking[BLOCKS];
byte give_ups = GIVE_UPS, done;

/* ---- a group ------------------------------------------------------------------------------------------------------- */
inline look(b) { atomic { k = kind[b]; g = gen[b] } }
inline look_again(b) { atomic { k2 = kind[b]; g2 = gen[b] } }
inline add(b) { pins[b]++ }
inline unpin(b) { atomic { pins[b]--; takes[b] = 1 } }
inline mark(b) {
  if
  :: writes ->
#ifdef NO_RAISE
     written[b] = g
#else
     atomic { if :: written[b] < g -> written[b] = g :: else fi }
#endif
  :: else
  fi
}
/* The copy of a block writes to another address than its accesses; any process may make the fence between. */
inline fence_arrival(b) {
  if
#ifndef NO_FENCED_GENERATION
  :: fenced == FENCED(g) -> skip
#else
  :: fenced % 8 == 7 -> skip
#endif
  :: else ->
     behind[b] = 1;
     atomic { if :: asked[b] < FENCED(g) -> asked[b] = FENCED(g) :: else fi }
  fi
}
inline judge(b) {
  if
#ifdef NO_SAME_WORD
  :: k2 == PRESENT -> fence_arrival(b); ok = 1
#else
  :: k2 == PRESENT && g2 == g -> fence_arrival(b); ok = 1
#endif
  :: else ->
     pins[b]--;
     if
     :: k2 == FAILED -> ok = 2
     :: else -> ok = 0
     fi
  fi
}
/* ok: 0 not yet, 1 pinned, 2 an error. */
inline pin(b) {
  look(b);
  fenced = asked[b];
  if
  :: k == FAILED -> ok = 2
  :: k == NOT_PRESENT || k == EVICTING || k == IN_PLACE -> ok = 0
  :: k == PRESENT ->
#if defined(NO_SECOND_LOOK)
     add(b); mark(b); fence_arrival(b); ok = 1
#elif defined(NO_PIN_FENCE)
     look_again(b); add(b); mark(b); judge(b)
#elif defined(NO_MARK_BEFORE)
     add(b); look_again(b); judge(b);
     if :: ok == 1 -> mark(b) :: else fi
#else
     if
     :: add(b); mark(b)
     :: writes -> mark(b); add(b)
     fi;
     look_again(b); judge(b)
#endif
  fi;
  atomic { k = 0; g = 0; k2 = 0; g2 = 0; fenced = 0 }
}

inline ask(b, u) {
  look(b);
  ok = 0;
  if
  :: k == NOT_PRESENT || (k == IN_PLACE && (u) > ROWS) ->
     atomic { if :: asked[b] < ASKED(g, u) -> was = asked[b]; asked[b] = ASKED(g, u); ok = 1 :: else fi }
     if
     :: ok ->
#ifdef NO_WAKE_FENCE
        saw = asleep;
#endif
        atomic { if :: nfull(ring) -> ring!b, u :: full(ring) -> ok = 0 fi }
        if
        :: ok ->
#ifndef NO_WAKE_FENCE
           saw = asleep;
#endif
           if :: saw -> asleep = 0 :: else fi
        :: else ->
#ifndef NO_UNASK
           atomic { if :: asked[b] == ASKED(g, u) -> asked[b] = was :: else fi }
#endif
        fi
     :: else
     fi
  :: else
  fi;
  atomic { k = 0; g = 0; was = 0; saw = 0; ok = 0 }
}

#ifdef NO_END_LOOK
#define ENDED 0
#else
#define ENDED ended
#endif

inline access(b) {
  assert(behind[b]);
  assert(where[b] != NONE && frame[where[b]] == shadow[b]);
#ifndef NO_UNPIN_RELEASE
  if
  :: writes -> atomic { assert(where[b] != NONE); frame[where[b]]++; shadow[b]++ }
  :: else
  fi
#endif
}
inline release(b) {
  unpin(b);
#ifdef NO_UNPIN_RELEASE
  if
  :: writes -> atomic { assert(where[b] != NONE); frame[where[b]]++; shadow[b]++ }
  :: else
  fi
#endif
}

proctype group(byte first; byte second; byte count; bit writes; byte times) {
  byte list[2], i, j, b, k, g, k2, g2, u, was, round, fenced;
  byte at = NONE;
  byte ok;
  byte ticket;
  bit saw, mine;
  list[0] = first;
  list[1] = second;
next:
  if :: times == 0 -> goto out :: else -> times-- fi;
  round = 0;
  i = 0;
attempt:
  do
  :: i < count ->
     b = list[i];
     pin(b);
     if :: ok == 1 -> i++ :: else -> break fi
  :: else -> break
  od;
  if :: at != NONE -> looking[at]--; at = NONE :: else fi;
  if :: i == count -> goto have :: else fi;
#ifndef NO_ALL_OR_NOTHING
  if
  :: !mine ->
     do :: i > 0 -> i--; unpin(list[i]) :: else -> break od
  :: else
  fi;
#endif
  if :: ok == 2 -> goto refused :: else fi;
  if
#if !defined(NO_TOKEN) && !defined(NO_ALL_OR_NOTHING)
  :: round == ROUNDS && !mine ->
     atomic { tickets++; ticket = tickets }
     do
     :: atomic { turn == 0 || turn > ticket -> turn = ticket }
     :: turn == ticket ->
        if
        :: atomic { ALLOWED(count) -> token = token + count; mine = 1 }
           break
        :: turn != ticket
        :: ENDED -> break
        :: atomic { give_ups > 0 -> give_ups-- }
           break
        fi
     :: ENDED -> break
     :: atomic { give_ups > 0 -> give_ups-- }
        break
     od;
#ifdef NO_TURN_BACK
     if :: mine -> atomic { if :: turn == ticket -> turn = 0 :: else fi } :: else fi;
#else
     atomic { if :: turn == ticket -> turn = 0 :: else fi }
#endif
     ticket = 0;
     if :: !mine -> goto refused :: else fi;
     goto attempt
#endif
  :: else -> if :: round < ROUNDS -> round++ :: else fi
  fi;
  /* wait_for */
  at = list[i];
  looking[at]++;
  b = at;
  if :: mine -> u = FIRST :: else -> u = WAIT fi;
  ask(b, u);
  j = i + 1;
  do
  :: j < count -> b = list[j]; if :: mine -> ask(b, FIRST) :: else -> ask(b, NEEDED) fi; j++
  :: else -> break
  od;
  atomic { j = 0; b = 0 };
  do
  :: kind[at] == PRESENT || kind[at] == FAILED -> goto attempt
  :: MAY_ASK(at, u) && asked[at] < ASKED(gen[at], u) && nfull(ring) -> b = at; ask(b, u)
  :: ENDED -> goto refused
  :: atomic { give_ups > 0 -> give_ups-- }
     goto refused
  od;
have:
  if :: mine -> mine = 0; token = token - count :: else fi;
  j = 0;
  do
  :: j < count -> b = list[j]; access(b); j++
  :: else -> break
  od;
  do :: i > 0 -> i--; b = list[i]; release(b) :: else -> break od;
  atomic { j = 0; b = 0; ok = 0 };
  goto next;
refused:
  if :: at != NONE -> looking[at]--; at = NONE :: else fi;
  if :: mine -> mine = 0; token = token - count :: else fi;
  do :: i > 0 -> i--; unpin(list[i]) :: else -> break od;
  goto next;
out:
  done++
}

/* As a gather: loads, and holds no pin while it waits. */
proctype reader(byte b; byte times) {
  byte k, g, k2, g2, was, ok;
  bit saw;
  do
  :: times == 0 -> break
  :: else ->
     look(b);
     if
     :: k == FAILED -> times--
     :: k == PRESENT || k == IN_PLACE ->
        add(b);
        look_again(b);
        if
        :: k2 == k && g2 == g ->
           if :: k == PRESENT -> behind[b] = 1 :: else fi;
           if
           :: k == PRESENT -> assert(where[b] != NONE && frame[where[b]] == shadow[b])
           :: else -> assert(store[b] == shadow[b])
           fi;
           unpin(b);
           times--
        :: else -> pins[b]--
        fi
     :: else ->
        if
        :: kind[b] == NOT_PRESENT && asked[b] < ASKED(gen[b], ROWS) && nfull(ring) -> ask(b, ROWS)
        :: kind[b] != NOT_PRESENT && kind[b] != EVICTING
        :: ENDED -> break
        fi
     fi;
     atomic { k = 0; g = 0; k2 = 0; g2 = 0; ok = 0 }
  od;
  done++
}

/* ---- the server ---------------------------------------------------------------------------------------------------- */
active proctype server() {
  byte b, u, f;
serve:
  if
  :: ended -> goto out
  :: ring?b, u ->
     if
     :: kind[b] == IN_PLACE && u > ROWS ->
#ifdef NO_RECALL_LOOK
        kind[b] = EVICTING;
#else
        kind[b] = EVICTING;
        (pins[b] == 0);
#endif
        atomic { kind[b] = NOT_PRESENT; gen[b]++ }
     :: kind[b] == NOT_PRESENT && u == ROWS -> atomic { kind[b] = IN_PLACE; goto serve }
     :: kind[b] == NOT_PRESENT
     :: kind[b] != NOT_PRESENT && !(kind[b] == IN_PLACE && u > ROWS) -> goto serve
     fi;
     if
     :: failures > 0 -> failures--; kind[b] = FAILED; goto serve
     :: true
     fi;
     need = 1;
     if :: ended -> goto out :: left > 0 fi;
     d_step {
       need = 0;
       left--;
       f = 0;
       do :: used[f] -> f++ :: else -> break od;
       used[f] = 1
     }
#ifdef NO_PUBLISH_RELEASE
     where[b] = f;
     atomic { kind[b] = PRESENT; held[b] = (u >= WAIT || u == ROWS) }
     frame[f] = store[b];
#else
     atomic { frame[f] = store[b]; behind[b] = 0 }
     where[b] = f;
     atomic { kind[b] = PRESENT; held[b] = (u >= WAIT || u == ROWS) }
#endif
     atomic { b = 0; u = 0; f = 0 };
     goto serve
  :: empty(ring) ->
     asleep = 1;
#ifndef NO_SLEEP_LOOK
     if :: nempty(ring) -> asleep = 0; goto serve :: empty(ring) fi;
#endif
end_asleep:
     (!asleep || ended);
     goto serve
  fi;
out:
  skip
}

#ifdef NO_HOLD
#define VICTIM(v) (kind[v] == PRESENT)
#else
#define VICTIM(v) (kind[v] == PRESENT && (!held[v] || takes[v] || looking[v] == 0))
#endif
#define FREE(v, u) ((u) != (v) && VICTIM(u) && pins[u] == 0)
#if BLOCKS > 2
#define OTHER(v) (FREE(v, 0) || FREE(v, 1) || FREE(v, 2))
#else
#define OTHER(v) (FREE(v, 0) || FREE(v, 1))
#endif

active proctype evictor() {
  byte v, seen;
  bit dirty, forced;
  byte out_copy;
end_idle:
  do
  :: ended -> break
  :: atomic { need && left == 0 && VICTIM(0) -> v = 0; forced = 1 }
     goto evict
  :: atomic { need && left == 0 && VICTIM(1) -> v = 1; forced = 1 }
     goto evict
#if BLOCKS > 2
  :: atomic { need && left == 0 && VICTIM(2) -> v = 2; forced = 1 }
     goto evict
#endif
  :: atomic { spurious > 0 && kind[0] == PRESENT -> spurious--; v = 0; forced = 0 }
     goto evict
  :: atomic { spurious > 0 && kind[1] == PRESENT -> spurious--; v = 1; forced = 0 }
     goto evict
  od;
  goto out;
evict:
#ifdef NO_EVICT_FENCE
  atomic { seen = pins[v]; takes[v] = 0; dirty = (written[v] == gen[v]) }
  kind[v] = EVICTING;
#else
  kind[v] = EVICTING;
#ifdef NO_UNPIN_ACQUIRE
  out_copy = frame[where[v]];
#endif
  if
  :: dirty = (written[v] == gen[v]); atomic { seen = pins[v]; takes[v] = 0 }
  :: atomic { seen = pins[v]; takes[v] = 0 } dirty = (written[v] == gen[v])
  fi;
#endif
  if
  :: seen == 0
  :: seen != 0 ->
     if
     :: pins[v] == 0
#ifndef NO_OTHER_VICTIM
     :: OTHER(v) -> kind[v] = PRESENT; goto end_idle
#endif
     :: !forced || ended -> kind[v] = PRESENT; goto end_idle
     fi
  fi;
#ifndef NO_UNPIN_ACQUIRE
  out_copy = frame[where[v]];
#endif
  if :: dirty -> store[v] = out_copy :: else fi;
  d_step { frame[where[v]] = GARBAGE; used[where[v]] = 0; where[v] = NONE }
  atomic { kind[v] = NOT_PRESENT; gen[v]++; left++; held[v] = 0 }
  assert(gen[v] < LIMIT);
  atomic { v = 0; seen = 0; dirty = 0; forced = 0; out_copy = 0 };
  goto end_idle;
out:
  skip
}

#ifdef END
active proctype ender() { ended = 1 }
#endif

#define RIGHT(b) (pins[b] == 0 && (where[b] == NONE -> store[b] == shadow[b] : frame[where[b]] == shadow[b]))
active proctype judge_all() {
  done == 2;
  atomic { assert(token == 0 && RIGHT(0) && RIGHT(1)) }
}

init {
  atomic {
    run group GROUP1;
#ifdef READER
    run reader READER
#else
    run group GROUP2
#endif
  }
}
