// What Python calls to cut JPEGs into segments, end to end as a part of a pack has them.

#include <stdlib.h>
#include <string.h>

#include "jpeg_restart.h"

// Mirrored by `_Cuts` in jpeg_restart.py. Rows of both outputs lie at their offsets; the last offset is where they end.
typedef struct {
    const uint8_t *const *images;
    const int64_t *image_bytes;
    int64_t count;
    int32_t restart, portable;
    int32_t *problems;  // [count]
    uint8_t *out, *index;
    int64_t out_room, index_room;
    int64_t *offsets, *index_offsets;  // [count + 1]
} Cuts;

// Returns where a row of at most `bytes` is written: in its place, or elsewhere if there might be no room for it.
static uint8_t *place_of(uint8_t *to, int64_t room, const int64_t *offset, size_t bytes, Room *elsewhere) {
    return bytes <= (size_t)(room - *offset) ? to + *offset : room_for(elsewhere, bytes);
}

// Has a row in its place, and says where it ends.
static int append(uint8_t *to, int64_t room, int64_t *offset, const uint8_t *from, size_t bytes) {
    if ((int64_t)bytes > room - *offset) return JPEG_NO_MEMORY;
    if (from != to + *offset) memcpy(to + *offset, from, bytes);
    offset[1] = *offset + (int64_t)bytes;
    return JPEG_OK;
}

// Images on their way, from the first that is not written to the last that has begun. They are written in their order;
// a few more of them than there are lanes, so that lanes need not wait for the slowest.
enum { WINDOW = 2 * LANES };

typedef struct {
    const Cuts *cuts;
    int64_t num_begun, num_written;
    Cut window[WINDOW];
    int problems[WINDOW], is_running[WINDOW];
    StepsPool pool;
    Lane idle;
    Room out, index;
} Cutter;

// Gives lanes that have nothing to do the next images.
static void begin_more(Cutter *cutter, int num_running) {
    const Cuts *cuts = cutter->cuts;
    while (num_running < LANES && cutter->num_begun < cuts->count && cutter->num_begun < cutter->num_written + WINDOW) {
        int64_t i = cutter->num_begun++, at = i % WINDOW;
        size_t bytes = (size_t)cuts->image_bytes[i];
        Cut *cut = &cutter->window[at];
        cutter->problems[at] = jpeg_begin_cut(cut, cuts->images[i], bytes, cuts->restart, &cutter->pool);
        cutter->is_running[at] = cutter->problems[at] == JPEG_OK;
        num_running += cutter->is_running[at];
    }
}

// Runs the lanes of all images that have begun, until one is done; returns how many still run.
static int run(Cutter *cutter) {
    Lane *lanes[LANES];
    int num_running = 0;
    for (int at = 0; at < WINDOW; at++)
        if (cutter->is_running[at]) lanes[num_running++] = &cutter->window[at].lane;
    if (num_running == 0) return 0;
    for (int i = num_running; i < LANES; i++) lanes[i] = &cutter->idle;
    jpeg_run_lanes(lanes, cutter->cuts->portable);
    for (int at = 0; at < WINDOW; at++) {
        Cut *cut = &cutter->window[at];
        if (!cutter->is_running[at] || !cut->lane.is_done) continue;
        cutter->problems[at] = cut->lane.problem, cutter->is_running[at] = 0, num_running--;
        jpeg_give_back(cut, &cutter->pool);
    }
    return num_running;
}

// Writes the next image, or leaves its row empty.
static void write_next(Cutter *cutter) {
    const Cuts *cuts = cutter->cuts;
    int64_t i = cutter->num_written++, *offset = cuts->offsets + i, *index_offset = cuts->index_offsets + i;
    const Cut *cut = &cutter->window[i % WINDOW];
    size_t out_bytes, index_bytes;
    int problem = cutter->problems[i % WINDOW];
    if (!problem) {
        size_t most = jpeg_most_bytes(cut), most_index = jpeg_most_index_bytes(cut);
        uint8_t *out = place_of(cuts->out, cuts->out_room, offset, most, &cutter->out);
        uint8_t *index = place_of(cuts->index, cuts->index_room, index_offset, most_index, &cutter->index);
        problem = out && index ? JPEG_OK : JPEG_NO_MEMORY;
        if (!problem) problem = jpeg_end_cut(cut, out, &out_bytes, index, &index_bytes, cuts->portable);
        if (!problem) problem = append(cuts->index, cuts->index_room, index_offset, index, index_bytes);
        if (!problem) problem = append(cuts->out, cuts->out_room, offset, out, out_bytes);
    }
    if (problem) offset[1] = offset[0], index_offset[1] = index_offset[0];
    cuts->problems[i] = problem;
}

// Cuts each image that can be; problems[i] says what is with the others, whose rows stay empty: what is not plain
// baseline, or broken, is left to libjpeg, which knows more kinds, and which damage can be lived with.
void shoal_jpeg_cut(const Cuts *cuts) {
    Cutter *cutter = calloc(1, sizeof *cutter);
    cuts->offsets[0] = cuts->index_offsets[0] = 0;
    for (int64_t i = 0; i < cuts->count && cutter == NULL; i++)
        cuts->problems[i] = JPEG_NO_MEMORY, cuts->offsets[i + 1] = cuts->index_offsets[i + 1] = 0;
    if (cutter == NULL) return;
    cutter->cuts = cuts;
    jpeg_idle_lane(&cutter->idle);
    for (int num_running = 0; cutter->num_written < cuts->count;) {
        begin_more(cutter, num_running);
        num_running = run(cutter);
        while (cutter->num_written < cutter->num_begun && !cutter->is_running[cutter->num_written % WINDOW])
            write_next(cutter);
    }
    for (int at = 0; at < WINDOW; at++) jpeg_free_cut(&cutter->window[at]);
    free(cutter->out.memory), free(cutter->index.memory), free(cutter);
}
