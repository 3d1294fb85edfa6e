/* What every model shares. Included first.
 *
 * The network keeps whatever was sent, for ever, and hands over any of it whenever it likes. So a
 * channel is a set that only grows, and taking a message picks one and leaves it there: loss,
 * delay, disorder, duplicates and replays are then all the same step, taken or not taken.
 *
 * OLD_RULE   the rule that was broken; without it, the rule that is in force
 * CHECK      the one property that is judged; without it, all of them
 */
#ifdef OLD_RULE
#define OLD true
#else
#define OLD false
#endif

#ifndef CHECK
#define CHECK 0
#endif

/* Properties are numbered in each model, from 1. */
#define CLAIM(property, holds) assert((CHECK != 0 && CHECK != property) || (holds))

/* Steps tell what happens when a trail is played back; a search does not print. */
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define MIN(a, b) ((a) < (b) -> (a) : (b))
