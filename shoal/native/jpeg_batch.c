// What Python calls: a batch of boxes resized, the pixels of one box, the sizes of a batch.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "jpeg.h"
#include "parallel.h"

// Variable rows of a column: of each part its bytes, how many there are, its offsets and how many rows they bound.
// Mirrored by `_Column` in jpeg.py.
typedef struct {
    const uint8_t *const *bases;
    const int64_t *lengths;
    const int64_t *const *offsets;
    const int64_t *rows;
    int64_t num_parts;
} Column;

// Mirrored by `_Batch` in jpeg.py.
typedef struct {
    Column images, indexes;  // indexes.num_parts 0: there is none
    const int32_t *part;     // NULL: everything is in part 0
    const int64_t *row;
    int64_t count;
    const double *boxes;   // [count, 4]: x, y, width, height
    const uint8_t *flips;  // NULL: none
    uint8_t *out;
    int32_t *problems;     // [count]
    WholeDecoder whole;    // NULL: images without an index are JPEG_UNSUPPORTED
    int32_t out_height, out_width, is_planar, antialias, portable;
} Batch;

typedef struct {
    const uint8_t *data;
    size_t size;
} Bytes;

typedef struct {
    int width, height;
} Size;

static int find_row(const Column *column, const Batch *batch, int64_t i, Bytes *found) {
    int32_t part = batch->part ? batch->part[i] : 0;
    int64_t row = batch->row[i];
    if (part < 0 || part >= column->num_parts || row < 0 || row >= column->rows[part]) return JPEG_OUTSIDE;
    int64_t begin = column->offsets[part][row], end = column->offsets[part][row + 1];
    if (begin < 0 || end < begin || end > column->lengths[part]) return JPEG_OUTSIDE;
    *found = (Bytes){column->bases[part] + begin, (size_t)(end - begin)};
    return JPEG_OK;
}

// Decodes at least [x0, x1) x [y0, y1), a box inside the size that was read: by segments, else whole.
static int decode(Workspace *work, Bytes image, Bytes index, WholeDecoder whole, Size size, const int box[4],
                  Planes *planes) {
    int problem = work->header.num_planes ? JPEG_OK : JPEG_UNSUPPORTED;
    if (!problem) problem = jpeg_decode_box(work, index.data, index.size, box[0], box[1], box[2], box[3], planes);
    if (!problem || index.size || problem == JPEG_NO_MEMORY || !whole) return problem;
    problem = whole(image.data, image.size, &work->planes, planes);
    // libjpeg has read the header by itself: what it found of another size does not cover the box.
    return problem || (planes->width == size.width && planes->height == size.height) ? problem : JPEG_BROKEN;
}

// Reads the header of an image; of one that only libjpeg can read, its size (header.num_planes is then 0).
static int read_size(Workspace *work, Bytes image, Bytes index, Size *size) {
    int problem = jpeg_read_header_of(image.data, image.size, &work->header);
    *size = (Size){work->header.width, work->header.height};
    if (!problem || index.size) return problem;
    work->header.num_planes = 0;
    return jpeg_size(image.data, image.size, &size->width, &size->height);
}

static int pixels_of(double begin, double length, int whole, int *from, int *until) {
    if (!(begin >= 0 && length > 0 && begin + length <= whole)) return JPEG_WRONG_BOX;  // also what is not a number
    *from = (int)floor(begin), *until = (int)ceil(begin + length);
    return *from < *until ? JPEG_OK : JPEG_WRONG_BOX;
}

static int resize_one(Workspace *work, const Batch *batch, int64_t i) {
    Bytes image, index = {NULL, 0};
    Planes planes;
    Size size;
    int box[4];
    int problem = find_row(&batch->images, batch, i, &image);
    if (!problem && batch->indexes.num_parts) problem = find_row(&batch->indexes, batch, i, &index);
    if (!problem) problem = read_size(work, image, index, &size);
    const double *asked = batch->boxes + 4 * i;
    if (!problem) problem = pixels_of(asked[0], asked[2], size.width, &box[0], &box[2]);
    if (!problem) problem = pixels_of(asked[1], asked[3], size.height, &box[1], &box[3]);
    if (!problem) problem = decode(work, image, index, batch->whole, size, box, &planes);
    if (problem) return problem;
    Resize resize = {asked[0], asked[1], asked[2], asked[3], batch->flips != NULL && batch->flips[i], batch->antialias,
                     batch->out_width, batch->out_height, batch->is_planar};
    size_t out_bytes = 3 * (size_t)batch->out_width * (size_t)batch->out_height;
    return jpeg_resize(work, &planes, &resize, batch->out + out_bytes * (size_t)i);
}

typedef struct {
    const Batch *batch;
    Workspace **spaces;
} Job;

static void resize_some(void *context, size_t slot, size_t begin, size_t end) {
    Job *job = context;
    if (job->spaces[slot] == NULL) job->spaces[slot] = calloc(1, sizeof(Workspace));
    Workspace *work = job->spaces[slot];
    if (work != NULL) work->portable = job->batch->portable;
    for (size_t i = begin; i < end; i++)
        job->batch->problems[i] = work ? resize_one(work, job->batch, (int64_t)i) : JPEG_NO_MEMORY;
}

// Decodes, crops, resizes and flips a batch; problems[i] says what is wrong with image i: its output is undefined.
void shoal_jpeg_crop_resize(const Batch *batch, size_t threads) {
    Workspace *spaces[MOST_THREADS] = {NULL};
    Job job = {batch, spaces};
    run_parallel(resize_some, &job, (size_t)batch->count, 1, threads);
    for (size_t i = 0; i < MOST_THREADS; i++) {
        if (spaces[i] == NULL) continue;
        free_workspace(spaces[i]);
        free(spaces[i]);
    }
}

// sizes[i] = width, height of image i, read from the headers only.
void shoal_jpeg_sizes(const Batch *batch, int32_t *sizes) {
    for (int64_t i = 0; i < batch->count; i++) {
        Bytes image;
        int problem = find_row(&batch->images, batch, i, &image);
        if (!problem) problem = jpeg_size(image.data, image.size, &sizes[2 * i], &sizes[2 * i + 1]);
        batch->problems[i] = problem;
    }
}

// The chroma of a pixel mixes the samples next to its own: one more on each side.
static void widen(const Header *header, int box[4]) {
    int whole[2] = {header->width, header->height}, step[2] = {header->h, header->v};
    for (int i = 0; i < 2; i++) {
        int low = (box[i] / step[i] - 1) * step[i], high = ((box[i + 2] - 1) / step[i] + 2) * step[i];
        box[i] = low < 0 ? 0 : low, box[i + 2] = high > whole[i] ? whole[i] : high;
    }
}

// The RGB of the pixels [x0, x1) x [y0, y1), as libjpeg's whole decode has them.
int shoal_jpeg_pixels(const uint8_t *data, size_t size, const uint8_t *index, size_t index_bytes, WholeDecoder whole,
                      int x0, int y0, int x1, int y1, uint8_t *rgb) {
    Workspace *work = calloc(1, sizeof *work);
    if (work == NULL) return JPEG_NO_MEMORY;
    Planes planes;
    Size found;
    int box[4] = {x0, y0, x1, y1};
    Bytes image = {data, size}, segments = {index, index_bytes};
    int problem = read_size(work, image, segments, &found);
    int is_inside = !problem && 0 <= x0 && x0 < x1 && x1 <= found.width && 0 <= y0 && y0 < y1 && y1 <= found.height;
    if (!problem && !is_inside) problem = JPEG_WRONG_BOX;
    if (!problem && work->header.num_planes) widen(&work->header, box);
    if (!problem) problem = decode(work, image, segments, whole, found, box, &planes);
    if (!problem) problem = jpeg_to_pixels(work, &planes, x0, y0, x1, y1, rgb);
    free_workspace(work);
    free(work);
    return problem;
}

// Resizes a box of an image that somebody else decoded: RGB, rows of width x 3 bytes.
int shoal_rgb_crop_resize(const uint8_t *rgb, int width, int height, const double box[4], int flip, int antialias,
                          int is_planar, int out_height, int out_width, int portable, uint8_t *out) {
    Workspace *work = calloc(1, sizeof *work);
    if (work == NULL) return JPEG_NO_MEMORY;
    work->portable = portable;
    Planes planes = {.kind = PLANES_RGB, .width = width, .height = height, .h = 1, .v = 1};
    size_t pixels = (size_t)width * (size_t)height;
    int unused[4], problem = pixels_of(box[0], box[2], width, &unused[0], &unused[2]);
    if (!problem) problem = pixels_of(box[1], box[3], height, &unused[1], &unused[3]);
    uint8_t *samples = problem ? NULL : room_for(&work->planes, 3 * pixels + SLACK);
    if (!problem && samples == NULL) problem = JPEG_NO_MEMORY;
    for (int i = 0; i < 3 && !problem; i++) {
        planes.planes[i] = (Plane){samples + (size_t)i * pixels, width, 0, 0, width, height};
        for (size_t at = 0; at < pixels; at++) planes.planes[i].samples[at] = rgb[3 * at + (size_t)i];
    }
    Resize resize = {box[0], box[1], box[2], box[3], flip, antialias, out_width, out_height, is_planar};
    if (!problem) problem = jpeg_resize(work, &planes, &resize, out);
    free_workspace(work);
    free(work);
    return problem;
}
