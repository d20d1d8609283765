// What Python calls to cut JPEGs into segments, end to end as a part of a pack has them.

#include <string.h>

#include "jpeg.h"

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

static int append(uint8_t *to, int64_t room, int64_t *offsets, const uint8_t *from, size_t bytes) {
    if ((int64_t)bytes > room - offsets[0]) return JPEG_NO_MEMORY;
    memcpy(to + offsets[0], from, bytes);
    offsets[1] = offsets[0] + (int64_t)bytes;
    return JPEG_OK;
}

// Cuts each image that can be; problems[i] says what is with the others, whose rows stay empty: what is not plain
// baseline, or broken, is left to libjpeg, which knows more kinds, and which damage can be lived with.
void shoal_jpeg_cut(const Cuts *cuts) {
    Cutter *cutter = jpeg_new_cutter(cuts->portable);
    cuts->offsets[0] = cuts->index_offsets[0] = 0;
    for (int64_t i = 0; i < cuts->count; i++) {
        const uint8_t *out, *index;
        size_t out_bytes, index_bytes;
        int64_t *offset = cuts->offsets + i, *index_offset = cuts->index_offsets + i;
        int problem = cutter ? JPEG_OK : JPEG_NO_MEMORY;
        if (!problem)
            problem = jpeg_cut(cutter, cuts->images[i], (size_t)cuts->image_bytes[i], cuts->restart, &out, &out_bytes,
                               &index, &index_bytes);
        if (!problem) problem = append(cuts->index, cuts->index_room, index_offset, index, index_bytes);
        if (!problem) problem = append(cuts->out, cuts->out_room, offset, out, out_bytes);
        if (problem) offset[1] = offset[0], index_offset[1] = index_offset[0];
        cuts->problems[i] = problem;
    }
    jpeg_free_cutter(cutter);
}
