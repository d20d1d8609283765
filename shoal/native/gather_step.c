// The positions of a step follow from the schedule, its samples from the order, their parts from where the parts begin.

#include "gather_step.h"

#include <stdlib.h>

#include "gather.h"

int open_notes(Notes *notes, const Schedule *schedule) {
    const size_t most = (size_t)(schedule->count > schedule->last_count ? schedule->count : schedule->last_count) + 1;
    notes->samples = malloc(most * sizeof(int64_t));
    notes->row = malloc(most * sizeof(int64_t));
    notes->start = malloc(most * sizeof(int64_t));
    notes->part = malloc(most * sizeof(int32_t));
    return notes->samples && notes->row && notes->start && notes->part;
}

void close_notes(Notes *notes) {
    free(notes->samples);
    free(notes->row);
    free(notes->start);
    free(notes->part);
}

static int gather_column(const Column *column, const Notes *notes, size_t count, char *out) {
    if (column->width == 0)
        return shoal_gather_parts(column->bases, column->lengths, column->num_parts, notes->part, notes->row, count,
                                  (size_t)column->item_bytes, out, 1) < 0;
    for (size_t i = 0; i < count; i++) notes->start[i] = notes->row[i] * column->stride;
    return shoal_gather_windows(column->bases, column->lengths, column->num_parts, notes->part, notes->start, count,
                                (size_t)column->width, (int)column->item_bytes, (int)column->is_signed, out, 1) < 0;
}

int gather_step(const Schedule *schedule, const Column *columns, size_t num_columns, int64_t step, const uint64_t *keys,
                const Notes *notes, char *const *out) {
    const int64_t number = step % schedule->steps_per_epoch;
    const int is_last = number == schedule->steps_per_epoch - 1;
    const int64_t first = number * schedule->batch_size + (is_last ? schedule->last_begin : schedule->begin);
    const size_t count = (size_t)(is_last ? schedule->last_count : schedule->count);
    for (size_t i = 0; i < count; i++) notes->samples[i] = first + (int64_t)i;
    if (schedule->a)
        shoal_permute(notes->samples, notes->samples, count, (uint64_t)schedule->num_samples, schedule->a, schedule->b,
                      keys, schedule->num_keys);
    const size_t parts = (size_t)schedule->num_parts;
    if (shoal_locate(notes->samples, count, schedule->starts, parts, notes->part, notes->row) < count) return 0;
    for (size_t c = 0; c < num_columns; c++)
        if (!gather_column(&columns[c], notes, count, out[c])) return 0;
    return 1;
}
