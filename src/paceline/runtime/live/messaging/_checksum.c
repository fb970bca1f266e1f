/* The CRC-32 of zlib, as fast as memory is read: `checksum.py` says what for, and has zlib's own where this is not.

Bytes are coefficients of a polynomial over {0, 1}, the first bit that of the highest power; the CRC is the remainder of
that polynomial divided by P. A block of 16 bytes, R(x), may be moved over the D bits behind it and added to them, since
R(x) * x^D is congruent to (its first half) * (x^(D+64) mod P) + (its second half) * (x^D mod P): two carry-less
multiplications. Several blocks are moved at once; what is left over in the end goes byte by byte through a table. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define POLYNOMIAL 0xEDB88320u /* P without x^32, the lowest bit being the coefficient of x^31 */
#define ALONE 4096             /* bytes from which on other threads may run Python meanwhile */

static uint32_t table[256];

/* All of it without the first and the last inversion: `crc` is the remainder so far. */
static uint32_t by_bytes(uint32_t crc, const uint8_t *data, size_t size) {
    while (size--)
        crc = (crc >> 8) ^ table[(crc ^ *data++) & 0xff];
    return crc;
}

typedef uint32_t Loop(uint32_t crc, const uint8_t *data, size_t size);

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>

/* x^n mod P, where a product of two 64-bit halves takes it: a power less than is meant, as the product has 127 bits. */
static uint64_t power(unsigned n) {
    uint32_t remainder = 1u << 31;
    while (--n)
        remainder = (remainder >> 1) ^ (remainder & 1 ? POLYNOMIAL : 0);
    return (uint64_t)remainder << 32;
}

static uint64_t moves[5][2]; /* over 16, 64, 128, 192 and 256 bytes: for the first half and for the second */
static const unsigned distances[5] = {16, 64, 128, 192, 256};

#define NARROW __attribute__((target("pclmul,sse4.1"))) static
#define WIDE __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq"))) static

NARROW __m128i constants(int which) { return _mm_loadu_si128((const __m128i *)moves[which]); }

NARROW __m128i move(__m128i block, __m128i constant, __m128i onto) {
    __m128i first = _mm_clmulepi64_si128(block, constant, 0x00), second = _mm_clmulepi64_si128(block, constant, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), onto);
}

/* The remainder of one block and of what is behind it. */
NARROW uint32_t finish(__m128i block, const uint8_t *data, size_t size) {
    const __m128i by_16 = constants(0);
    for (; size >= 16; size -= 16, data += 16)
        block = move(block, by_16, _mm_loadu_si128((const __m128i *)data));
    uint8_t last[16];
    _mm_storeu_si128((__m128i *)last, block);
    return by_bytes(by_bytes(0, last, 16), data, size);
}

NARROW uint32_t narrow(uint32_t crc, const uint8_t *data, size_t size) {
    if (size < 64)
        return by_bytes(crc, data, size);
    const __m128i by_64 = constants(1), by_16 = constants(0), *from = (const __m128i *)data;
    __m128i block[4];
    for (int i = 0; i < 4; i++)
        block[i] = _mm_loadu_si128(from + i);
    block[0] = _mm_xor_si128(block[0], _mm_cvtsi32_si128((int)crc));
    for (size -= 64, data += 64; size >= 64; size -= 64, data += 64) {
        from = (const __m128i *)data;
        for (int i = 0; i < 4; i++)
            block[i] = move(block[i], by_64, _mm_loadu_si128(from + i));
    }
    for (int i = 1; i < 4; i++)
        block[i] = move(block[i - 1], by_16, block[i]);
    return finish(block[3], data, size);
}

WIDE __m512i move_four(__m512i blocks, __m512i constant, __m512i onto) {
    __m512i first = _mm512_clmulepi64_epi128(blocks, constant, 0x00),
            second = _mm512_clmulepi64_epi128(blocks, constant, 0x11);
    return _mm512_ternarylogic_epi64(first, second, onto, 0x96);
}

WIDE uint32_t wide(uint32_t crc, const uint8_t *data, size_t size) {
    if (size < 256)
        return narrow(crc, data, size);
    __m512i blocks[4], constant[5];
    for (int i = 1; i < 5; i++)
        constant[i] = _mm512_broadcast_i32x4(constants(i));
    for (int i = 0; i < 4; i++)
        blocks[i] = _mm512_loadu_si512(data + 64 * i);
    blocks[0] = _mm512_xor_si512(blocks[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size -= 256, data += 256; size >= 256; size -= 256, data += 256)
        for (int i = 0; i < 4; i++)
            blocks[i] = move_four(blocks[i], constant[4], _mm512_loadu_si512(data + 64 * i));
    for (int i = 0; i < 3; i++)
        blocks[3] = move_four(blocks[i], constant[3 - i], blocks[3]);
    for (; size >= 64; size -= 64, data += 64)
        blocks[3] = move_four(blocks[3], constant[1], _mm512_loadu_si512(data));
    __m128i block = _mm512_extracti32x4_epi32(blocks[3], 0);
    block = move(block, constants(0), _mm512_extracti32x4_epi32(blocks[3], 1));
    block = move(block, constants(0), _mm512_extracti32x4_epi32(blocks[3], 2));
    block = move(block, constants(0), _mm512_extracti32x4_epi32(blocks[3], 3));
    return finish(block, data, size);
}

static Loop *fastest(void) {
    for (int i = 0; i < 5; i++) {
        moves[i][0] = power(8 * distances[i] + 64);
        moves[i][1] = power(8 * distances[i]);
    }
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1"))
        return NULL;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? wide : narrow;
}
#else
static Loop *fastest(void) { return NULL; }
#endif

static Loop *loop;

static PyObject *crc32(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    unsigned long crc = 0;
    Py_buffer view;
    if (number != 1 && number != 2) {
        PyErr_Format(PyExc_TypeError, "crc32 takes 1 or 2 arguments, %zd were given", number);
        return NULL;
    }
    if (number == 2 && (crc = PyLong_AsUnsignedLongMask(given[1]), PyErr_Occurred()))
        return NULL;
    if (PyObject_GetBuffer(given[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t remainder = ~(uint32_t)crc;
    if (view.len < ALONE)
        remainder = loop(remainder, view.buf, (size_t)view.len);
    else {
        Py_BEGIN_ALLOW_THREADS;
        remainder = loop(remainder, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong((uint32_t)~remainder);
}

static int prepare(PyObject *Py_UNUSED(module)) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        table[byte] = byte;
        for (int bit = 0; bit < 8; bit++)
            table[byte] = (table[byte] >> 1) ^ (table[byte] & 1 ? POLYNOMIAL : 0);
    }
    if ((loop = fastest()) == NULL)
        PyErr_SetString(PyExc_ImportError, "this processor has no carry-less multiplication");
    return loop == NULL ? -1 : 0;
}

static PyMethodDef methods[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc32, METH_FASTCALL, "crc32(data, value=0): as zlib's."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "paceline.runtime.live.messaging._checksum", "CRC-32.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__checksum(void) { return PyModuleDef_Init(&definition); }
