// Resizes a box of an image: crop, scale, flip and colours in one pass over the output's rows.
//
// 1. For each direction and plane a table says which samples an output pixel takes, and with what weight: two
//    neighbours (bilinear), or with antialiasing a triangle as wide as one output pixel is in samples. Weights are
//    integers that add up to 16,384 exactly.
// 2. Row by row of the output: samples down to one row (7 bits after the point), then along to the output's width (6).
// 3. Chroma keeps its own resolution until here: its table is the luma's in chroma samples. Colours are converted last.
//
// Nothing outside the box is looked at (a chroma sample that covers a pixel of it is inside), so what comes out does
// not depend on how much of the image was decoded. 4 samples 0, 10, 20, 30 to 2: at 0.5 and 2.5, so 5 and 25.

#include <math.h>
#include <string.h>

#include "jpeg_kernels.h"

// One side of a box, in pixels, and what it becomes.
typedef struct {
    double begin, length;
    int whole, out, flip, antialias;
} Side;

static int taps_needed(const Side *side, int step) {
    double scale = side->length / side->out / step;
    return side->antialias && scale > 1 ? (int)ceil(scale) * 2 + 1 : 2;
}

static int padded_to(int count) { return (count + 15) & ~15; }

// First places, the order and starts of fours, and the weights.
static size_t table_items(const Side *side, int step) {
    return (size_t)padded_to(side->out) * (3 + (size_t)(taps_needed(side, step) + 1) / 2);
}

static void put_weight(Taps *taps, int i, int tap, int weight) {
    int32_t *pair = &taps->weights[tap / 2 * taps->padded + i];
    *pair |= tap % 2 ? (int32_t)((uint32_t)weight << 16) : weight;
}

// Two neighbours of the place, those at the border alone.
static void between_two(Taps *taps, int i, double place) {
    double last = taps->high - 1;
    place = place < taps->low ? taps->low : place > last ? last : place;
    int left = (int)place;
    int weight = (int)((place - left) * (1 << WEIGHT_BITS) + 0.5);
    taps->first[i] = left - taps->low;
    put_weight(taps, i, 0, (1 << WEIGHT_BITS) - weight);
    put_weight(taps, i, 1, weight);
}

static double triangle(double x) { return fabs(x) < 1 ? 1 - fabs(x) : 0; }

// A triangle of the width `scale` on either side of the centre, cut off at the border of the box.
static void under_triangle(Taps *taps, int i, double centre, double scale) {
    int begin = (int)floor(centre - scale + 0.5), end = (int)floor(centre + scale + 0.5);
    begin = begin < taps->low ? taps->low : begin;
    end = end > taps->high ? taps->high : end;
    double total = 0, sum = 0;
    for (int k = begin; k < end; k++) total += triangle((k + 0.5 - centre) / scale);
    int before = 0;
    taps->first[i] = begin - taps->low;
    for (int k = begin; k < end; k++) {
        sum += triangle((k + 0.5 - centre) / scale);
        int until = (int)(sum / total * (1 << WEIGHT_BITS) + 0.5);  // sums are rounded, not weights: they end at 16,384
        put_weight(taps, i, k - begin, until - before);
        before = until;
    }
}

// Of every four output pixels: the lowest place, and how the eight samples from there on are put in order. Beyond the
// output everything is as of its last pixel.
static void order_fours(Taps *taps, int out) {
    for (int i = out; i < taps->padded; i++) taps->first[i] = taps->first[out - 1];
    taps->fits = 1;
    for (int i = 0; i < taps->padded; i += 4) {
        const int32_t *first = taps->first + i;
        int low = first[0] < first[3] ? first[0] : first[3], high = first[0] < first[3] ? first[3] : first[0];
        if (high - low > 6) taps->fits = 0;
        taps->starts[i / 4] = low;
        for (int k = 0; k < 4; k++) {
            uint32_t byte = 2 * (uint32_t)(first[k] - low);  // two samples of two bytes, side by side
            taps->order[i + k] = (int32_t)(byte * 0x01010101u + 0x03020100u);
        }
    }
}

// Whether a side lies in the image, and has pixels there: what tables can be made of.
static int has_pixels(const Side *side) {
    double end = side->begin + side->length;
    return side->begin >= 0 && end <= side->whole && floor(side->begin) < ceil(end);
}

// Fills a table; `step` is how many pixels a sample of this plane is wide. Returns the memory after it.
static int32_t *make_taps(Taps *taps, const Side *side, int step, int32_t *memory) {
    int low = (int)floor(side->begin), high = (int)ceil(side->begin + side->length);
    high = high > side->whole ? side->whole : high;
    taps->low = low / step, taps->high = (high + step - 1) / step;
    taps->pairs = (taps_needed(side, step) + 1) / 2, taps->padded = padded_to(side->out);
    taps->first = memory, taps->order = memory + taps->padded;
    taps->starts = memory + 2 * taps->padded, taps->weights = memory + 3 * taps->padded;
    size_t items = table_items(side, step);
    memset(memory, 0, items * sizeof *memory);
    double scale = side->length / side->out;
    for (int i = 0; i < side->out; i++) {
        double centre = (side->begin + ((side->flip ? side->out - 1 - i : i) + 0.5) * scale) / step;
        if (side->antialias && scale > step) under_triangle(taps, i, centre, scale / step);
        else between_two(taps, i, centre - 0.5);
    }
    order_fours(taps, side->out);
    return memory + items;
}

typedef struct {
    Taps across[2], down[2];  // of luma, of chroma
    const Kernels *kernels;
    RowPair *pairs;
    int16_t *between, *lines[3];
    uint8_t *rgb;
} Work;

// One row of one plane at the output's width.
static void resize_line(const Work *work, const Plane *plane, int is_chroma, int y, int16_t *out) {
    const Taps *down = &work->down[is_chroma], *across = &work->across[is_chroma];
    const uint8_t *samples = plane->samples + (across->low - plane->x);
    for (int j = 0; j < down->pairs; j++) {
        RowPair *pair = &work->pairs[j];
        pair->weights = down->weights[j * down->padded + y];
        for (int k = 0; k < 2; k++) {
            int row = down->low + down->first[y] + 2 * j + k;
            if (row > down->high - 1) row = down->high - 1;  // its weight is 0
            pair->rows[k] = samples + (ptrdiff_t)(row - plane->y) * plane->stride;
        }
    }
    work->kernels->down(work->pairs, down->pairs, across->high - across->low, work->between);
    work->kernels->along(across, work->between, out);
}

static void put_row(const Work *work, const Planes *planes, int width, uint8_t *const out[3]) {
    if (planes->kind == PLANES_YCC) {
        work->kernels->convert((const int16_t *const *)work->lines, width, out);
        return;
    }
    for (int i = 0; i < 3; i++) work->kernels->round(work->lines[planes->kind == PLANES_GREY ? 0 : i], width, out[i]);
}

// Every table and row that is needed, in the workspace's memory.
static int prepare(Workspace *space, const Planes *planes, const Side *x, const Side *y, Work *work) {
    int is_ycc = planes->kind == PLANES_YCC, h = is_ycc ? planes->h : 1, v = is_ycc ? planes->v : 1;
    size_t items = table_items(x, 1) + table_items(x, h) + table_items(y, 1) + table_items(y, v);
    int32_t *memory = room_for(&space->tables, items * sizeof *memory + SLACK);
    if (memory == NULL) return JPEG_NO_MEMORY;
    memory = make_taps(&work->across[0], x, 1, memory);
    memory = make_taps(&work->across[1], x, h, memory);
    memory = make_taps(&work->down[0], y, 1, memory);
    make_taps(&work->down[1], y, v, memory);
    size_t columns = (size_t)(work->across[0].high - work->across[0].low) + 2 * (size_t)work->across[0].pairs + 64;
    size_t padded = (size_t)work->across[0].padded;
    size_t pair_bytes = ((size_t)work->down[0].pairs + 2) * sizeof(RowPair);
    uint8_t *rows = room_for(&space->rows, pair_bytes + (columns + 3 * padded) * sizeof(int16_t) + 3 * padded + SLACK);
    if (rows == NULL) return JPEG_NO_MEMORY;
    work->pairs = (RowPair *)rows;
    work->between = (int16_t *)(rows + pair_bytes);
    for (int i = 0; i < 3; i++) work->lines[i] = work->between + columns + (size_t)i * padded;
    work->rgb = (uint8_t *)(work->lines[2] + padded);
    work->kernels = jpeg_kernels(space->portable);
    return JPEG_OK;
}

int jpeg_resize(Workspace *space, const Planes *planes, const Resize *resize, uint8_t *out) {
    Side x = {resize->x, resize->w, planes->width, resize->out_width, resize->flip, resize->antialias};
    Side y = {resize->y, resize->h, planes->height, resize->out_height, 0, resize->antialias};
    Work work;
    int problem = has_pixels(&x) && has_pixels(&y) ? prepare(space, planes, &x, &y, &work) : JPEG_WRONG_BOX;
    if (problem) return problem;
    size_t width = (size_t)resize->out_width, plane_bytes = width * (size_t)resize->out_height;
    int num_planes = planes->kind == PLANES_GREY ? 1 : 3;
    for (int row = 0; row < resize->out_height; row++) {
        for (int i = 0; i < num_planes; i++)
            resize_line(&work, &planes->planes[i], i > 0 && planes->kind == PLANES_YCC, row, work.lines[i]);
        uint8_t *first = resize->is_planar ? out + (size_t)row * width : work.rgb;
        size_t apart = resize->is_planar ? plane_bytes : width;
        uint8_t *rgb[3] = {first, first + apart, first + 2 * apart};
        put_row(&work, planes, resize->out_width, rgb);
        if (!resize->is_planar) {
            uint8_t *to = out + 3 * width * (size_t)row;
            for (size_t i = 0; i < width; i++)
                for (size_t channel = 0; channel < 3; channel++) to[3 * i + channel] = rgb[channel][i];
        }
    }
    return JPEG_OK;
}
