// The batch of one step: which samples it has, and where they are gathered from.

#ifndef SHOAL_GATHER_STEP_H
#define SHOAL_GATHER_STEP_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *const *bases;
    const int64_t *lengths;
    int64_t num_parts;
    int64_t item_bytes;  // of a row, or of one token
    int64_t is_signed;
    int64_t width;   // tokens of a window; 0: rows
    int64_t stride;  // from one window to the next
} Column;

typedef struct {
    int64_t num_samples, batch_size, steps_per_epoch;
    int64_t begin, count;            // positions of a whole batch that are this worker's: [begin, begin + count)
    int64_t last_begin, last_count;  // the same of the last batch of an epoch
    int64_t first_step, last_step;   // which steps there are
    uint64_t a, b;                   // the grid of the order; a is 0 where nothing is shuffled
    uint64_t num_keys;
    const int64_t *starts;  // part p holds samples [starts[p], starts[p + 1])
    int64_t num_parts;
} Schedule;

// What a thread notes down of the samples of a batch.
typedef struct {
    int64_t *samples, *row, *start;
    int32_t *part;
} Notes;

// Returns whether there was memory for it.
int open_notes(Notes *notes, const Schedule *schedule);
void close_notes(Notes *notes);

// Gathers the samples of a step: those of column c into out[c]. `keys` are those of its epoch. Returns whether all of
// them lie in their parts; if not, what is in `out` is undefined.
int gather_step(const Schedule *schedule, const Column *columns, size_t num_columns, int64_t step, const uint64_t *keys,
                const Notes *notes, char *const *out);

#endif
