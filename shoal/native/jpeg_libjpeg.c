// What libjpeg does for shoal: transcodes a JPEG into segments, without touching a coefficient, and decodes the kinds
// that have none (progressive, CMYK, unusual samplings). A library of its own, left out where jpeglib.h is not there.

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

#include "jpeg.h"

typedef struct {
    struct jpeg_error_mgr manager;
    jmp_buf leave;
    int problem;
} Errors;

static void leave(j_common_ptr info) {
    Errors *errors = (Errors *)info->err;
    errors->problem = info->err->msg_code == JERR_OUT_OF_MEMORY ? JPEG_NO_MEMORY : JPEG_BROKEN;
    longjmp(errors->leave, 1);
}

// libjpeg goes on after an image that is cut short, and fills it with grey: here that is an error.
static void warn(j_common_ptr info, int level) {
    int code = info->err->msg_code;
    int is_cut = code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER;
    int is_broken = code == JWRN_HUFF_BAD_CODE || code == JWRN_MUST_RESYNC;
    if (level < 0 && (is_cut || is_broken)) leave(info);
}

static void be_silent(j_common_ptr info) { (void)info; }

static void prepare_errors(Errors *errors) {
    jpeg_std_error(&errors->manager);
    errors->manager.error_exit = leave;
    errors->manager.emit_message = warn;
    errors->manager.output_message = be_silent;
    errors->problem = JPEG_OK;
}

// Whether the segments of such an image can be decoded by jpeg_segments.c.
static int is_ours(const struct jpeg_decompress_struct *from) {
    const jpeg_component_info *planes = from->comp_info;
    if (from->progressive_mode || from->arith_code || from->data_precision != 8) return 0;
    if (from->num_components == 1) return from->jpeg_color_space == JCS_GRAYSCALE;
    if (from->num_components != 3 || from->jpeg_color_space != JCS_YCbCr) return 0;
    for (int i = 1; i < 3; i++)
        if (planes[i].h_samp_factor != 1 || planes[i].v_samp_factor != 1) return 0;
    return planes[0].h_samp_factor <= 2 && planes[0].v_samp_factor <= 2;
}

static int is_rewritten(const struct jpeg_marker_struct *marker) {
    if (marker->marker == JPEG_APP0 && marker->data_length >= 5) return memcmp(marker->data, "JFIF", 5) == 0;
    return marker->marker == JPEG_APP0 + 14 && marker->data_length >= 5 && memcmp(marker->data, "Adobe", 5) == 0;
}

// EXIF, colour profiles and comments come along; libjpeg writes JFIF's marker itself.
static void copy_markers(const struct jpeg_decompress_struct *from, struct jpeg_compress_struct *to) {
    for (jpeg_saved_marker_ptr marker = from->marker_list; marker != NULL; marker = marker->next)
        if (!is_rewritten(marker)) jpeg_write_marker(to, marker->marker, marker->data, marker->data_length);
}

static void save_markers(struct jpeg_decompress_struct *from) {
    jpeg_save_markers(from, JPEG_COM, 0xFFFF);
    for (int i = 0; i < 16; i++) jpeg_save_markers(from, JPEG_APP0 + i, 0xFFFF);
}

// Where libjpeg writes to: memory that doubles. libjpeg's own loses track of it when an error comes in between.
typedef struct {
    struct jpeg_destination_mgr manager;
    uint8_t *memory;
    size_t room, written;
} Output;

static void grow_output(j_compress_ptr to, size_t used) {
    Output *output = (Output *)to->dest;
    size_t room = output->room ? 2 * output->room : 1 << 16;
    uint8_t *memory = realloc(output->memory, room);
    if (memory == NULL) ERREXIT1(to, JERR_OUT_OF_MEMORY, 0);
    output->memory = memory, output->room = room;
    output->manager.next_output_byte = memory + used;
    output->manager.free_in_buffer = room - used;
}

static void begin_output(j_compress_ptr to) { grow_output(to, 0); }

static boolean more_output(j_compress_ptr to) {
    grow_output(to, ((Output *)to->dest)->room);
    return TRUE;
}

static void end_output(j_compress_ptr to) {
    Output *output = (Output *)to->dest;
    output->written = output->room - output->manager.free_in_buffer;
}

typedef struct {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    Errors errors;
    Output output;
    int is_ours;
} Transcoding;

// Whether an image that is left as it is will be found to have this size when it is loaded. libjpeg steps over bytes that
// are no markers, and may find another image behind them.
static int has_size_of(const struct jpeg_decompress_struct *from, const uint8_t *data, size_t size) {
    int width, height;
    if (jpeg_size(data, size, &width, &height) != JPEG_OK) return 0;
    return width == (int)from->image_width && height == (int)from->image_height;
}

static int run_transcoding(Transcoding *t, const uint8_t *data, size_t size, int restart) {
    prepare_errors(&t->errors);
    t->from.err = t->to.err = &t->errors.manager;
    if (setjmp(t->errors.leave)) return t->errors.problem;
    jpeg_create_decompress(&t->from);
    jpeg_create_compress(&t->to);
    jpeg_mem_src(&t->from, data, (unsigned long)size);
    save_markers(&t->from);
    jpeg_read_header(&t->from, TRUE);
    if ((int64_t)t->from.image_width * t->from.image_height > MOST_PIXELS) return JPEG_UNSUPPORTED;
    t->is_ours = is_ours(&t->from);
    if (!t->is_ours && !has_size_of(&t->from, data, size)) return JPEG_BROKEN;
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&t->from);  // also of what is left as it is: is it whole?
    if (t->is_ours) {
        t->output.manager = (struct jpeg_destination_mgr){
            .init_destination = begin_output, .empty_output_buffer = more_output, .term_destination = end_output};
        t->to.dest = &t->output.manager;
        jpeg_copy_critical_parameters(&t->from, &t->to);
        t->to.optimize_coding = TRUE;  // the image's own codes are 2% to 5% shorter: most of what the markers cost
        int is_wide = t->from.num_components == 3 && t->from.comp_info[0].h_samp_factor == 2;
        t->to.restart_interval = (unsigned)(is_wide ? restart : 2 * restart);
        jpeg_write_coefficients(&t->to, coefficients);
        copy_markers(&t->from, &t->to);
        jpeg_finish_compress(&t->to);
    }
    jpeg_finish_decompress(&t->from);
    return JPEG_OK;
}

// The index of segments, see jpeg_read_index: found by looking for the markers in what was written.
static int make_index(const uint8_t *jpeg, size_t size, uint8_t **index, size_t *index_bytes) {
    Header *header = calloc(1, sizeof *header);
    int problem = header == NULL ? JPEG_NO_MEMORY : jpeg_read_header_of(jpeg, size, header);
    int64_t num_segments = problem ? 0 : jpeg_num_segments(header), found = 0;
    uint8_t *to = *index = problem ? NULL : malloc((size_t)num_segments * 5 + 1);
    if (!problem && to == NULL) problem = JPEG_NO_MEMORY;
    const uint8_t *begin = problem ? NULL : header->scan, *end = jpeg + size;
    free(header);
    if (problem) return problem;
    *to++ = 1;
    for (const uint8_t *p = begin; p + 1 < end; p++) {
        if (p[0] != 0xFF || p[1] == 0) continue;
        if (++found > num_segments) break;
        to = write_length(to, (size_t)(p - begin));
        begin = p + 2;
        p++;
    }
    *index_bytes = (size_t)(to - *index);
    return found == num_segments ? JPEG_OK : JPEG_BROKEN;
}

void shoal_jpeg_free(void *memory) { free(memory); }

// Writes the same image with a restart marker every `restart` x 16 pixels of width, and the index of its segments; both
// are the caller's, to be given to shoal_jpeg_free. *out is NULL for an image that is better left as it is.
int shoal_jpeg_transcode(const uint8_t *data, size_t size, int restart, uint8_t **out, size_t *out_bytes,
                         uint8_t **index, size_t *index_bytes) {
    Transcoding *t = calloc(1, sizeof *t);
    *out = *index = NULL;
    *out_bytes = *index_bytes = 0;
    if (t == NULL) return JPEG_NO_MEMORY;
    int problem = run_transcoding(t, data, size, restart);
    jpeg_destroy_decompress(&t->from);
    jpeg_destroy_compress(&t->to);
    if (!problem && t->is_ours) problem = make_index(t->output.memory, t->output.written, index, index_bytes);
    if (problem) {
        free(t->output.memory);
        free(*index);
        *index = NULL;
    } else {
        *out = t->output.memory, *out_bytes = t->output.written;
    }
    free(t);
    return problem;
}

typedef struct {
    struct jpeg_decompress_struct from;
    Errors errors;
} Decoding;

// Planes as they are in the file: the same samples that the segments give.
static int decode_planes(Decoding *d, Room *room, Planes *planes) {
    struct jpeg_decompress_struct *from = &d->from;
    size_t bytes = 0, at[3] = {0};
    from->raw_data_out = TRUE;
    jpeg_start_decompress(from);
    planes->h = from->max_h_samp_factor, planes->v = from->max_v_samp_factor;
    if (from->num_components == 1) planes->h = planes->v = 1;
    for (int i = 0; i < from->num_components; i++) {
        const jpeg_component_info *info = &from->comp_info[i];
        int mcu_rows = (int)from->total_iMCU_rows;
        planes->planes[i] = (Plane){.stride = (int)info->width_in_blocks * 8 + 64,
                                    .across = (int)info->downsampled_width,
                                    .down = (int)info->downsampled_height};
        at[i] = bytes;
        bytes += (size_t)planes->planes[i].stride * (size_t)mcu_rows * 8 * (size_t)info->v_samp_factor;
    }
    uint8_t *samples = room_for(room, bytes + SLACK);
    if (samples == NULL) return JPEG_NO_MEMORY;
    for (int i = 0; i < from->num_components; i++) planes->planes[i].samples = samples + at[i];
    while (from->output_scanline < from->output_height) {
        JSAMPROW rows[3][32];
        JSAMPARRAY arrays[3] = {rows[0], rows[1], rows[2]};
        for (int i = 0; i < from->num_components; i++) {
            int high = from->comp_info[i].v_samp_factor * 8;
            int first = (int)from->output_scanline / (from->max_v_samp_factor * 8) * high;
            for (int k = 0; k < high; k++)
                rows[i][k] = planes->planes[i].samples + (size_t)(first + k) * (size_t)planes->planes[i].stride;
        }
        jpeg_read_raw_data(from, arrays, (JDIMENSION)from->max_v_samp_factor * 8);
    }
    return JPEG_OK;
}

static uint8_t product(int a, int b) {
    int scaled = a * b + 128;
    return (uint8_t)((scaled + (scaled >> 8)) >> 8);
}

// Any other kind, as RGB; inks as Pillow mixes them (Adobe's programs write them inverted).
static int decode_rgb(Decoding *d, Room *room, Planes *planes) {
    struct jpeg_decompress_struct *from = &d->from;
    int is_ink = from->jpeg_color_space == JCS_CMYK || from->jpeg_color_space == JCS_YCCK;
    from->out_color_space = is_ink ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(from);
    size_t width = from->output_width, pixels = width * from->output_height;
    int across = (int)width, down = (int)from->output_height;
    uint8_t *samples = room_for(room, 3 * pixels + 4 * width + SLACK);
    if (samples == NULL) return JPEG_NO_MEMORY;
    JSAMPROW line = samples + 3 * pixels;
    for (int i = 0; i < 3; i++)
        planes->planes[i] = (Plane){samples + (size_t)i * pixels, across, 0, 0, across, down};
    while (from->output_scanline < from->output_height) {
        size_t row = from->output_scanline * width, step = is_ink ? 4 : 3;
        jpeg_read_scanlines(from, &line, 1);
        int turn = is_ink && !from->saw_Adobe_marker ? 255 : 0;
        for (size_t x = 0; x < width; x++)
            for (size_t i = 0; i < 3; i++) {
                int value = line[step * x + i];
                if (is_ink) value = (line[4 * x + 3] ^ turn) - product(255 - (value ^ turn), line[4 * x + 3] ^ turn);
                samples[i * pixels + row + x] = (uint8_t)value;
            }
    }
    return JPEG_OK;
}

static int run_decoding(Decoding *d, const uint8_t *data, size_t size, Room *room, Planes *planes) {
    prepare_errors(&d->errors);
    d->from.err = &d->errors.manager;
    if (setjmp(d->errors.leave)) return d->errors.problem;
    jpeg_create_decompress(&d->from);
    jpeg_mem_src(&d->from, data, (unsigned long)size);
    jpeg_read_header(&d->from, TRUE);
    int64_t pixels = (int64_t)d->from.image_width * d->from.image_height;
    if (pixels > MOST_PIXELS || d->from.data_precision != 8) return JPEG_UNSUPPORTED;
    *planes = (Planes){.width = (int)d->from.image_width, .height = (int)d->from.image_height, .h = 1, .v = 1};
    int is_plain = d->from.jpeg_color_space == JCS_GRAYSCALE || d->from.jpeg_color_space == JCS_YCbCr;
    for (int i = 1; i < d->from.num_components && is_plain; i++)
        is_plain = d->from.comp_info[i].h_samp_factor == 1 && d->from.comp_info[i].v_samp_factor == 1;
    is_plain = is_plain && d->from.comp_info[0].h_samp_factor <= 2 && d->from.comp_info[0].v_samp_factor <= 2;
    planes->kind = !is_plain ? PLANES_RGB : d->from.num_components == 1 ? PLANES_GREY : PLANES_YCC;
    int problem = is_plain ? decode_planes(d, room, planes) : decode_rgb(d, room, planes);
    if (!problem) jpeg_finish_decompress(&d->from);
    return problem;
}

// A WholeDecoder: every sample of the image, in its planes.
int shoal_jpeg_whole(const uint8_t *data, size_t size, Room *room, Planes *planes) {
    Decoding *d = calloc(1, sizeof *d);
    if (d == NULL) return JPEG_NO_MEMORY;
    int problem = run_decoding(d, data, size, room, planes);
    jpeg_destroy_decompress(&d->from);
    free(d);
    return problem;
}
