// Planes to RGB exactly as libjpeg does it by default: chroma by its "fancy" upsampling, colours by its 16-bit table.
//
// A chroma sample stands in the middle of its two (or four) pixels; a pixel takes 3/4 of its own sample and 1/4 of the
// next one on its side, down and then along. Samples 100, 120 along one row: pixels 100, 105, 115, 120.

#include <string.h>

#include "jpeg.h"

static inline int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

static inline uint8_t to_byte(int value) { return (uint8_t)clamp(value, 0, 255); }

static const uint8_t *row_of(const Plane *plane, int y) {
    return plane->samples + (ptrdiff_t)(clamp(y, 0, plane->down - 1) - plane->y) * plane->stride - plane->x;
}

// 3 x the nearer row + the farther, of the samples [c0, c1); where rows are not upsampled, 4 x the row.
static void mix_rows(const Plane *plane, int v, int y, int c0, int c1, int16_t *sums) {
    const uint8_t *near = row_of(plane, y / v), *far = v == 1 ? near : row_of(plane, y / 2 + (y % 2 ? 1 : -1));
    for (int c = c0; c < c1; c++) sums[c - c0] = (int16_t)(3 * near[c] + far[c]);
}

// The samples of one plane for the pixels [x0, x1) of row y. libjpeg repeats samples where a plane is two wide or less.
static void upsample_row(const Plane *plane, int h, int v, int y, int x0, int x1, int16_t *sums, uint8_t *out) {
    if (h == 1 && v == 1) {
        memcpy(out, row_of(plane, y) + x0, (size_t)(x1 - x0));
        return;
    }
    if (h == 2 && plane->across <= 2) {
        const uint8_t *near = row_of(plane, y / v);
        for (int x = x0; x < x1; x++) out[x - x0] = near[x / 2];
        return;
    }
    int c0 = clamp(x0 / h - 1, 0, plane->across - 1), c1 = clamp((x1 - 1) / h + 2, 1, plane->across);
    mix_rows(plane, v, y, c0, c1, sums);
    for (int x = x0; x < x1; x++) {
        int own = sums[x / h - c0];
        if (h == 1) {
            out[x - x0] = (uint8_t)((own + (y % 2 ? 2 : 1)) >> 2);
            continue;
        }
        int next = sums[clamp(x / 2 + (x % 2 ? 1 : -1), 0, plane->across - 1) - c0];
        int mixed = 3 * own + next;  // of 16; of rows that are not mixed every term has a 4 in it
        out[x - x0] = (uint8_t)(v == 2 ? (mixed + (x % 2 ? 7 : 8)) >> 4 : (mixed / 4 + (x % 2 ? 2 : 1)) >> 2);
    }
}

static void convert_row(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, int count, uint8_t *rgb) {
    for (int i = 0; i < count; i++, rgb += 3) {
        int y = luma[i], cb = blue[i] - 128, cr = red[i] - 128;
        rgb[0] = to_byte(y + ((91881 * cr + 32768) >> 16));
        rgb[1] = to_byte(y + ((-22554 * cb - 46802 * cr + 32768) >> 16));
        rgb[2] = to_byte(y + ((116130 * cb + 32768) >> 16));
    }
}

static void interleave_row(const Planes *planes, int y, int x0, int x1, uint8_t *rgb) {
    for (int channel = 0; channel < 3; channel++) {
        const Plane *plane = &planes->planes[planes->kind == PLANES_GREY ? 0 : channel];
        const uint8_t *row = row_of(plane, y);
        for (int x = x0; x < x1; x++) rgb[3 * (x - x0) + channel] = row[x];
    }
}

int jpeg_to_pixels(Workspace *work, const Planes *planes, int x0, int y0, int x1, int y1, uint8_t *rgb) {
    size_t width = (size_t)(x1 - x0);
    uint8_t *rows = room_for(&work->rows, width * 3 + (width + 8) * sizeof(int16_t) + SLACK);
    if (rows == NULL) return JPEG_NO_MEMORY;
    int16_t *sums = (int16_t *)(rows + ((width * 3 + 63) & ~(size_t)63));
    for (int y = y0; y < y1; y++, rgb += 3 * width) {
        if (planes->kind != PLANES_YCC) {
            interleave_row(planes, y, x0, x1, rgb);
            continue;
        }
        upsample_row(&planes->planes[0], 1, 1, y, x0, x1, sums, rows);
        for (int i = 1; i < 3; i++)
            upsample_row(&planes->planes[i], planes->h, planes->v, y, x0, x1, sums, rows + (size_t)i * width);
        convert_row(rows, rows + width, rows + 2 * width, x1 - x0, rgb);
    }
    return JPEG_OK;
}
