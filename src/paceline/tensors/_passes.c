/* Passes over memory that torch would make twice: `passes.py` says what they are for, and checks what they are given.

Addresses come as numbers, vectors are of 32-bit floats. Others may run Python meanwhile. Sums are in the order and with
the roundings of torch's own operations where it has wide vectors: one for `a + b * c`. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPONENT 0x7f800000u /* all of its bits are set in NaN and Inf, and only there */
#define BLOCK 1024           /* floats that are looked at together: those of several vectors fit a first-level cache */

#if defined(__GNUC__) && defined(__x86_64__)
#include <emmintrin.h>
#define LOOP __attribute__((target("avx2,fma"))) static /* `passes.py` asks torch whether the processor has these */
#else
#define LOOP static
#endif

/* Whether all that was copied is finite. */
LOOP int copy(uint32_t *restrict target, const uint32_t *restrict source, Py_ssize_t count) {
    uint32_t odd = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t bits = source[i];
        target[i] = bits;
        odd |= (bits & EXPONENT) == EXPONENT;
    }
    return !odd;
}

/* The same with stores that neither read what is there nor stay in a cache. */
static int copy_around(uint32_t *target, const uint32_t *source, Py_ssize_t count) {
#if defined(__GNUC__) && defined(__x86_64__)
    Py_ssize_t first = (Py_ssize_t)(-(uintptr_t)target / 4 % 16); /* up to where a line of the cache begins */
    if (first > count)
        first = count;
    int finite = copy(target, source, first);
    Py_ssize_t i = first;
    const __m128i exponent = _mm_set1_epi32((int)EXPONENT);
    __m128i odd = _mm_setzero_si128();
    for (; i + 16 <= count; i += 16)
        for (Py_ssize_t j = i; j < i + 16; j += 4) {
            __m128i bits = _mm_loadu_si128((const __m128i *)(source + j));
            _mm_stream_si128((__m128i *)(target + j), bits);
            odd = _mm_or_si128(odd, _mm_cmpeq_epi32(_mm_and_si128(bits, exponent), exponent));
        }
    _mm_sfence(); /* whoever is told next that it is there must find it */
    return finite & (_mm_movemask_epi8(odd) == 0) & copy(target + i, source + i, count - i);
#else
    return copy(target, source, count);
#endif
}

/* values += rate * (the sum of the gradients); the new values are written to all targets, too. */
LOOP void step_all(float *restrict values, const float *const *gradients, Py_ssize_t several, float *const *targets,
                   Py_ssize_t writes, float rate, Py_ssize_t count) {
    float total[BLOCK];
    for (Py_ssize_t at = 0; at < count; at += BLOCK) {
        Py_ssize_t length = count - at < BLOCK ? count - at : BLOCK;
        const float *sum = gradients[0] + at;
        float *new = values + at;
        if (several > 1) {
            for (Py_ssize_t i = 0; i < length; i++)
                total[i] = sum[i] + (gradients[1] + at)[i];
            for (Py_ssize_t each = 2; each < several; each++) {
                const float *restrict gradient = gradients[each] + at;
                for (Py_ssize_t i = 0; i < length; i++)
                    total[i] += gradient[i];
            }
            sum = total;
        }
        for (Py_ssize_t i = 0; i < length; i++)
            new[i] = fmaf(rate, sum[i], new[i]);
        for (Py_ssize_t each = 0; each < writes; each++)
            memcpy(targets[each] + at, new, (size_t)length * sizeof(float));
    }
}

/* One gradient after the other; each is written over by the values after it. */
LOOP void step_each(float *restrict values, float *const *gradients, Py_ssize_t several, const float *rates,
                    Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at += BLOCK) {
        Py_ssize_t length = count - at < BLOCK ? count - at : BLOCK;
        const float *latest = values + at;
        for (Py_ssize_t each = 0; each < several; each++) {
            float *gradient = gradients[each] + at, rate = rates[each];
            for (Py_ssize_t i = 0; i < length; i++)
                gradient[i] = fmaf(rate, gradient[i], latest[i]);
            latest = gradient;
        }
        memcpy(values + at, latest, (size_t)length * sizeof(float));
    }
}

/* From Python. What fails has set an exception. */

static int takes(const char *name, Py_ssize_t wanted, Py_ssize_t given) {
    if (wanted != given)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, wanted, given);
    return wanted == given;
}

static int read_address(PyObject *number, void **found) {
    *found = PyLong_AsVoidPtr(number);
    if (PyErr_Occurred())
        return 0;
    if ((uintptr_t)*found % sizeof(float) != 0)
        PyErr_SetString(PyExc_ValueError, "floats begin at a multiple of four");
    return !PyErr_Occurred();
}

static int read_rate(PyObject *number, float *found) {
    double given = PyFloat_AsDouble(number);
    if (PyErr_Occurred())
        return 0;
    *found = (float)given;
    if (isfinite(given) && !isfinite(*found))
        PyErr_SetString(PyExc_OverflowError, "the learning rate is too large for a 32-bit float");
    return !PyErr_Occurred();
}

static int read_count(PyObject *number, Py_ssize_t *found) {
    *found = PyLong_AsSsize_t(number);
    return !PyErr_Occurred();
}

/* Memory for one thing of each in a tuple, at least one, and how many there are; NULL if that is not to be had. */
static void *room_for(PyObject *tuple, size_t each, Py_ssize_t *several) {
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "several come in a tuple");
        return NULL;
    }
    *several = PyTuple_Size(tuple);
    void *room = PyMem_Calloc((size_t)*several + 1, each);
    return room == NULL ? PyErr_NoMemory() : room;
}

/* The addresses in a tuple, and how many: to be freed. */
static void **read_addresses(PyObject *tuple, Py_ssize_t *several) {
    void **found = room_for(tuple, sizeof(void *), several);
    for (Py_ssize_t i = 0; found != NULL && i < *several; i++)
        if (!read_address(PyTuple_GetItem(tuple, i), found + i)) {
            PyMem_Free(found);
            return NULL;
        }
    return found;
}

static float *read_rates(PyObject *tuple, Py_ssize_t wanted) {
    Py_ssize_t several;
    float *found = room_for(tuple, sizeof(float), &several);
    if (found != NULL && several != wanted)
        PyErr_SetString(PyExc_ValueError, "there is a rate for each gradient");
    for (Py_ssize_t i = 0; found != NULL && !PyErr_Occurred() && i < several; i++)
        read_rate(PyTuple_GetItem(tuple, i), found + i);
    if (PyErr_Occurred()) {
        PyMem_Free(found);
        return NULL;
    }
    return found;
}

static PyObject *copy_and_look(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    void *target, *source;
    Py_ssize_t count;
    if (!takes("copy_and_look", 4, number) || !read_address(given[0], &target) || !read_address(given[1], &source) ||
        !read_count(given[2], &count))
        return NULL;
    int around = PyObject_IsTrue(given[3]), finite;
    if (around < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    finite = around ? copy_around(target, source, count) : copy(target, source, count);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(finite);
}

static PyObject *step(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    void *values, **gradients, **targets;
    float rate;
    Py_ssize_t count, several, writes;
    if (!takes("step", 5, number) || !read_address(given[0], &values) || !read_rate(given[3], &rate) ||
        !read_count(given[4], &count))
        return NULL;
    if ((gradients = read_addresses(given[1], &several)) == NULL)
        return NULL;
    if ((targets = read_addresses(given[2], &writes)) == NULL) {
        PyMem_Free(gradients);
        return NULL;
    }
    if (several > 0) {
        Py_BEGIN_ALLOW_THREADS;
        step_all(values, (const float *const *)gradients, several, (float *const *)targets, writes, rate, count);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(gradients);
    PyMem_Free(targets);
    Py_RETURN_NONE;
}

static PyObject *step_on_each(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    void *values, **gradients;
    float *rates;
    Py_ssize_t count, several;
    if (!takes("step_on_each", 4, number) || !read_address(given[0], &values) || !read_count(given[3], &count))
        return NULL;
    if ((gradients = read_addresses(given[1], &several)) == NULL)
        return NULL;
    if ((rates = read_rates(given[2], several)) == NULL) {
        PyMem_Free(gradients);
        return NULL;
    }
    if (several > 0) {
        Py_BEGIN_ALLOW_THREADS;
        step_each(values, (float *const *)gradients, several, rates, count);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(gradients);
    PyMem_Free(rates);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_and_look", (PyCFunction)(void (*)(void))copy_and_look, METH_FASTCALL,
     "copy_and_look(target, source, count, around): whether all that was copied is finite."},
    {"step", (PyCFunction)(void (*)(void))step, METH_FASTCALL,
     "step(values, gradients, targets, rate, count): values += rate * (their sum), and to all targets."},
    {"step_on_each", (PyCFunction)(void (*)(void))step_on_each, METH_FASTCALL,
     "step_on_each(values, gradients, rates, count): on one after the other, each then holds the values after it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "paceline.tensors._passes", "Passes over memory, compiled.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__passes(void) { return PyModuleDef_Init(&definition); }
