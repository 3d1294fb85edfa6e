/* The ledger: what becomes of updates, and what devices are told of them.
 *
 * One device and its clone, so that two bodies may come for each identity (generation, round). Other
 * devices show only in that a round meets its quorum or misses it, whatever this one did. An update
 * may come once its round was opened, as often as the network likes, for ever.
 *
 * The aggregator dies between any two steps, as often as it likes; what is not in its database is
 * gone. Its home is put back from a backup, which begins a generation.
 *
 * Its calendar jumps at will. So there is no calendar here: whether a round was closed long enough
 * ago to be forgotten is answered anew, either way, each time that somebody asks.
 */
#include "common.pml"

#define EXACTLY_ONCE      1  /* a counted update is in the log or in one version; none is in two */
#define NO_FALSE_VERDICT  2  /* what is told of an update agrees with what became of it */
#define ONE_BODY          3  /* of two bodies for one identity at most one is counted */

#ifndef ROUNDS
#define ROUNDS 2             /* of each generation */
#endif
#ifndef RESTORES
#define RESTORES 1
#endif
#define NUMBERS (ROUNDS + RESTORES * ROUNDS)   /* rounds opened in all: a new generation counts on */
#define GENERATIONS (RESTORES + 1)
#define BODIES 2

#define NOTHING 0            /* else body + 1 */

/* An identity (generation, round), and an update of it. */
#define ID(g, r) ((g) * (NUMBERS + 1) + (r))
#define IDS (GENERATIONS * (NUMBERS + 1))
#define UPDATE(i, b) ((i) * BODIES + (b))
#define UPDATES (IDS * BODIES)

mtype = { COUNTED, LATE, REFUSED, CONFLICT, FORGOTTEN };

/* The aggregator's database. Ghosts stand in it, too, so that a restore sets them back as well: what
 * was told before is judged against the history that it belongs to. */
typedef Database {
    byte generation;
    byte round;              /* the newest; 0 for none */
    bool open;
    byte row[NUMBERS + 1];   /* generation + 1 in which a round was opened; 0 for none */
    byte judged[IDS];        /* body + 1 of the stored verdict */
    bool refused[IDS];       /* that verdict is a refusal */
    byte logged[IDS];        /* body + 1 of an update that awaits its version */
    bool forgotten[NUMBERS + 1]; /* the mark of a round whose verdicts were deleted */

    bool counted[UPDATES];   /* ghost: committed and absorbed */
    byte versions[UPDATES];  /* ghost: how many versions it entered */
}
Database db, backup;
bool have_backup;
byte restores;

/* The aggregator's memory. */
byte staged = NOTHING;       /* body + 1, for the open round */
bool absorbed = true;        /* all that is in the log */
bool unsaid;                 /* a verdict was committed and its receipt not made */

bool fits[BODIES];           /* the method's check passes */
bool sound[BODIES];          /* the method can absorb it: the same every time */

#define OPEN_ID ID(db.generation, db.round)

/* For the formula at the end: of one update, the first of generation 0. */
#ifdef LTL
bool calm, told, came;       /* came: another way round each time that it comes */
#define idle (staged == NOTHING && absorbed && !unsaid)
#define IS_WATCHED(id, body) ((id) == ID(0, 1) && (body) == 0)
#endif

#ifdef LTL
#define CAN_DIE !calm
#else
#define CAN_DIE true
#endif

inline tell(id, body, verdict) {
#ifdef LTL
    told = told || IS_WATCHED(id, body);
#endif
    printf("aggregator: generation %d, round %d, body %d: %e\n",
           (id) / (NUMBERS + 1), (id) % (NUMBERS + 1), body, verdict);
    CLAIM(NO_FALSE_VERDICT, !(verdict == COUNTED) || db.counted[UPDATE(id, body)]);
    CLAIM(NO_FALSE_VERDICT,
          !(verdict == LATE || verdict == REFUSED || verdict == CONFLICT)
          || !db.counted[UPDATE(id, body)])
}

inline repeat_or_conflict(id, body) {
    if
#ifdef SILENT                    /* What if who comes again were not told again? */
    :: !unsaid -> skip
#endif
    :: db.judged[id] != body + 1 -> tell(id, body, CONFLICT)
    :: db.judged[id] == body + 1 && db.refused[id] -> tell(id, body, REFUSED)
    :: db.judged[id] == body + 1 && !db.refused[id] -> tell(id, body, COUNTED)
    fi
}

#define NOT_OPENED(g, r) (g == db.generation && r > db.round)
inline receive(gen, number, body) {
    if
    :: db.open && gen == db.generation && number == db.round ->
        if
        :: staged == body + 1 -> skip               /* its receipt is about to be made */
        :: staged != NOTHING && staged != body + 1 -> tell(ID(gen, number), body, CONFLICT)
        :: staged == NOTHING && db.judged[ID(gen, number)] != NOTHING -> repeat_or_conflict(ID(gen, number), body)
        :: staged == NOTHING && db.judged[ID(gen, number)] == NOTHING ->
            printf("device: body %d for round %d comes\n", body, number);
            staged = body + 1
        fi
    :: !(db.open && gen == db.generation && number == db.round) ->
        if
        :: db.judged[ID(gen, number)] != NOTHING -> repeat_or_conflict(ID(gen, number), body)
        :: db.judged[ID(gen, number)] == NOTHING ->
            if
            :: NOT_OPENED(gen, number) -> tell(ID(gen, number), body, REFUSED)
            :: !NOT_OPENED(gen, number) && db.row[number] != gen + 1 ->
                tell(ID(gen, number), body, FORGOTTEN)
            :: !NOT_OPENED(gen, number) && db.row[number] == gen + 1 ->
                /* The old rule asks the calendar, which may say either. */
                if
                :: OLD || db.forgotten[number] -> tell(ID(gen, number), body, FORGOTTEN)
                :: OLD || !db.forgotten[number] -> tell(ID(gen, number), body, LATE)
                fi
            fi
        fi
    fi
}

/* One transaction: the update in the log and its verdict; or the verdict alone. */
inline commit() {
    db.judged[OPEN_ID] = staged;
    db.refused[OPEN_ID] = !fits[staged - 1];
    if
    :: fits[staged - 1] -> db.logged[OPEN_ID] = staged; absorbed = false
    :: else
    fi;
    printf("aggregator: commits body %d for round %d\n", staged - 1, db.round);
    staged = NOTHING;
    unsaid = true
}

#ifdef FICKLE
/* What if an update could be absorbed once, and not when the log is absorbed again? */
#define can_absorb(b) true
#define cannot_absorb(b) true
#else
#define can_absorb(b) sound[b]
#define cannot_absorb(b) (!sound[b])
#endif

/* What is in the log enters the method's sums, in memory. What cannot is quarantined, for good. */
inline absorb() {
    for (i : 0 .. IDS - 1) {
        if
        :: db.logged[i] != NOTHING && can_absorb(db.logged[i] - 1) ->
            db.counted[UPDATE(i, db.logged[i] - 1)] = true
        :: db.logged[i] != NOTHING && cannot_absorb(db.logged[i] - 1) ->
            printf("aggregator: quarantines an update\n");
            db.logged[i] = NOTHING;
            db.refused[i] = true
        :: else
        fi
    }
    i = 0;
    absorbed = true
}
inline say() {
    if
    :: db.judged[OPEN_ID] != NOTHING -> repeat_or_conflict(OPEN_ID, db.judged[OPEN_ID] - 1)
    :: else
    fi;
    unsaid = false
}

inline enter_version() {
    for (i : 0 .. IDS - 1) {
        if
        :: db.logged[i] != NOTHING -> db.versions[UPDATE(i, db.logged[i] - 1)]++
        :: else
        fi
    }
    i = 0
}

/* One transaction: the version with all that is in the log, the emptied log, the closed round. */
inline close() {
    if
    :: printf("aggregator: round %d becomes a version\n", db.round);
        enter_version();
        for (i : 0 .. IDS - 1) { db.logged[i] = NOTHING }
        i = 0;
        db.open = false
    :: printf("aggregator: round %d misses its quorum\n", db.round);
        db.open = false
#ifdef TWO_TRANSACTIONS
    /* What if the version were written before the log is emptied? */
    :: printf("aggregator: writes round %d's version, and dies\n", db.round);
        enter_version();
        staged = NOTHING; absorbed = false
#endif
    fi
}

/* One transaction: a round's verdicts are deleted, and the round is marked. Under the old rule the
 * mark is not asked: an update of a closed round is judged by the calendar. */
inline forget(number) {
    printf("aggregator: finds round %d old, and deletes its verdicts\n", number);
    db.judged[ID(db.row[number] - 1, number)] = NOTHING;
    db.forgotten[number] = true
}

inline invariants() {
    for (i : 0 .. IDS - 1) {
        CLAIM(ONE_BODY, !(db.counted[UPDATE(i, 0)] && db.counted[UPDATE(i, 1)]));
        for (j : 0 .. BODIES - 1) {
            CLAIM(EXACTLY_ONCE, db.versions[UPDATE(i, j)] <= 1);
            CLAIM(EXACTLY_ONCE, !absorbed || !db.counted[UPDATE(i, j)]
                  || db.versions[UPDATE(i, j)] + (db.logged[i] == j + 1 -> 1 : 0) == 1)
        }
    }
    i = 0; j = 0
}

#define copy_database(from, to) \
    to.generation = from.generation; to.round = from.round; to.open = from.open; \
    for (i : 0 .. NUMBERS) { to.row[i] = from.row[i]; to.forgotten[i] = from.forgotten[i] } \
    for (i : 0 .. IDS - 1) { \
        to.judged[i] = from.judged[i]; to.refused[i] = from.refused[i]; \
        to.logged[i] = from.logged[i] } \
    for (i : 0 .. UPDATES - 1) { \
        to.counted[i] = from.counted[i]; to.versions[i] = from.versions[i] } \
    i = 0

bool opened[IDS];            /* a manifest of this identity went out, in whatever life */

inline any_update() {
    select (g : 0 .. GENERATIONS - 1);
    select (r : 1 .. NUMBERS);
    select (b : 0 .. BODIES - 1)
}

active proctype world() {
    byte i, j, g, r, b;
    /* What the two bodies are like; the second may be as good as the first. */
    d_step { fits[0] = true; sound[0] = true };
    if :: fits[1] = true; sound[1] = true :: fits[1] = true :: skip fi;
    do
    /* the network */
    :: absorbed && !unsaid -> atomic {
        any_update();
        if :: opened[ID(g, r)] -> receive(g, r, b) :: else fi;
#ifdef LTL
        if :: opened[ID(g, r)] && IS_WATCHED(ID(g, r), b) -> came = !came :: else fi;
#endif
        g = 0; r = 0; b = 0
    }
#ifdef LTL
    :: !calm -> calm = true
#endif
    /* the aggregator */
    :: !db.open && absorbed && !unsaid && staged == NOTHING && db.round < ROUNDS * (db.generation + 1) -> atomic {
        db.open = true;
        db.round++;
        db.row[db.round] = db.generation + 1;
        opened[OPEN_ID] = true;
        printf("aggregator: opens round %d of generation %d\n", db.round, db.generation);
        absorbed = false;                        /* what was carried over */
    }
    :: staged != NOTHING -> d_step { commit() }
    :: !absorbed -> atomic { absorb(); invariants() }
    :: absorbed && unsaid -> atomic { say() }
#ifdef LTL
    :: absorbed && unsaid && !calm -> unsaid = false   /* the receipt is lost */
#endif
    :: db.open && absorbed && !unsaid && staged == NOTHING -> atomic { close(); invariants() }
    :: absorbed && !unsaid -> atomic {
        select (r : 1 .. NUMBERS);
        if
        :: db.row[r] != 0 && !(db.open && r == db.round) -> forget(r)
        :: else
        fi;
        r = 0
    }
    /* accidents */
    :: CAN_DIE -> d_step {
        printf("aggregator: dies and starts again\n");
        staged = NOTHING; unsaid = false; absorbed = false
    }
    :: restores < RESTORES && !have_backup -> d_step {
        printf("operator: makes a backup\n");
        have_backup = true;
        copy_database(db, backup)
    }
    :: restores < RESTORES && have_backup -> d_step {
        printf("operator: puts the backup back\n");
        restores++; have_backup = false;
        copy_database(backup, db);
        db.open = false;                         /* the open round is given up */
        db.generation = restores;
        staged = NOTHING; unsaid = false; absorbed = false
    }
    od
}

/* A device sends its update again and again. Once nobody dies any more it is told a verdict, if the
 * network goes on to carry it and the aggregator comes to the end of a turn again and again. */
#ifdef LTL
ltl LIVES { (<>[] calm && []<> came && []<> !came && []<> idle) -> <> told }
#endif
