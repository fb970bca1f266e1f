/* Passes over memory that torch would make twice: `passes.py` says what they are for, and checks what they are given.

Addresses come as numbers, vectors are of 32-bit floats. Others may run Python meanwhile. Sums are in the order and with
the roundings of torch's own operations: one rounding for `a + b * c` where the processor can, which compilers do by
themselves if the target has it. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define EXPONENT 0x7f800000u /* all of its bits are set in NaN and Inf, and only there */
#define BLOCK 1024           /* floats that are looked at together: those of several vectors fit a first-level cache */

/* Each body is compiled twice, for any processor and for those with wide vectors. */
#if defined(__GNUC__) && defined(__x86_64__)
#include <emmintrin.h>
#define BODY static inline __attribute__((always_inline))
#define WIDE __attribute__((target("avx2,fma")))
#define IS_WIDE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define BODY static inline
#define WIDE
#define IS_WIDE 0
#endif

BODY int copy_body(uint32_t *restrict target, const uint32_t *restrict source, Py_ssize_t count) {
    uint32_t odd = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t bits = source[i];
        target[i] = bits;
        odd |= (bits & EXPONENT) == EXPONENT;
    }
    return !odd;
}

static int copy_anywhere(uint32_t *target, const uint32_t *source, Py_ssize_t count) {
    return copy_body(target, source, count);
}
WIDE static int copy_wide(uint32_t *target, const uint32_t *source, Py_ssize_t count) {
    return copy_body(target, source, count);
}
static int copy(uint32_t *target, const uint32_t *source, Py_ssize_t count) {
    return IS_WIDE ? copy_wide(target, source, count) : copy_anywhere(target, source, count);
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
BODY void step_body(float *restrict values, const float *const *gradients, Py_ssize_t several, float *const *targets,
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
            new[i] = new[i] + rate * sum[i];
        for (Py_ssize_t each = 0; each < writes; each++)
            memcpy(targets[each] + at, new, (size_t)length * sizeof(float));
    }
}

static void step_anywhere(float *values, const float *const *gradients, Py_ssize_t several, float *const *targets,
                          Py_ssize_t writes, float rate, Py_ssize_t count) {
    step_body(values, gradients, several, targets, writes, rate, count);
}
WIDE static void step_wide(float *values, const float *const *gradients, Py_ssize_t several, float *const *targets,
                           Py_ssize_t writes, float rate, Py_ssize_t count) {
    step_body(values, gradients, several, targets, writes, rate, count);
}

/* One gradient after the other; each is written over by the values after it. */
BODY void each_body(float *restrict values, float *const *gradients, Py_ssize_t several, const float *rates,
                    Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at += BLOCK) {
        Py_ssize_t length = count - at < BLOCK ? count - at : BLOCK;
        const float *latest = values + at;
        for (Py_ssize_t each = 0; each < several; each++) {
            float *gradient = gradients[each] + at, rate = rates[each];
            for (Py_ssize_t i = 0; i < length; i++)
                gradient[i] = latest[i] + rate * gradient[i];
            latest = gradient;
        }
        memcpy(values + at, latest, (size_t)length * sizeof(float));
    }
}

static void each_anywhere(float *values, float *const *gradients, Py_ssize_t several, const float *rates,
                          Py_ssize_t count) {
    each_body(values, gradients, several, rates, count);
}
WIDE static void each_wide(float *values, float *const *gradients, Py_ssize_t several, const float *rates,
                           Py_ssize_t count) {
    each_body(values, gradients, several, rates, count);
}

/* From Python. */

static int takes(const char *name, Py_ssize_t wanted, Py_ssize_t given) {
    if (wanted != given)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, wanted, given);
    return wanted == given;
}

/* The addresses in a tuple, and how many: to be freed; NULL with an exception set. */
static void **addresses(PyObject *tuple, Py_ssize_t *several) {
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "addresses come in a tuple");
        return NULL;
    }
    *several = PyTuple_Size(tuple);
    void **found = PyMem_Malloc((size_t)(*several ? *several : 1) * sizeof(void *));
    if (found == NULL)
        return (void **)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < *several; i++)
        found[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
    if (PyErr_Occurred()) {
        PyMem_Free(found);
        return NULL;
    }
    return found;
}

static PyObject *copy_and_look(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    if (!takes("copy_and_look", 4, number))
        return NULL;
    void *target = PyLong_AsVoidPtr(given[0]), *source = PyLong_AsVoidPtr(given[1]);
    Py_ssize_t count = PyLong_AsSsize_t(given[2]);
    int around = PyObject_IsTrue(given[3]), finite;
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    finite = around ? copy_around(target, source, count) : copy(target, source, count);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(finite);
}

static PyObject *step(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    if (!takes("step", 5, number))
        return NULL;
    float *values = PyLong_AsVoidPtr(given[0]);
    float rate = (float)PyFloat_AsDouble(given[3]);
    Py_ssize_t count = PyLong_AsSsize_t(given[4]), several, writes;
    if (PyErr_Occurred())
        return NULL;
    void **gradients = addresses(given[1], &several);
    if (gradients == NULL)
        return NULL;
    void **targets = addresses(given[2], &writes);
    if (targets == NULL) {
        PyMem_Free(gradients);
        return NULL;
    }
    if (several > 0) {
        Py_BEGIN_ALLOW_THREADS;
        (IS_WIDE ? step_wide : step_anywhere)(values, (const float *const *)gradients, several, (float *const *)targets,
                                              writes, rate, count);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(gradients);
    PyMem_Free(targets);
    Py_RETURN_NONE;
}

static PyObject *step_on_each(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    if (!takes("step_on_each", 4, number))
        return NULL;
    float *values = PyLong_AsVoidPtr(given[0]);
    Py_ssize_t count = PyLong_AsSsize_t(given[3]), several;
    if (PyErr_Occurred())
        return NULL;
    void **gradients = addresses(given[1], &several);
    if (gradients == NULL)
        return NULL;
    float *rates = PyMem_Malloc((size_t)(several ? several : 1) * sizeof(float));
    if (rates == NULL)
        PyErr_NoMemory();
    else
        for (Py_ssize_t i = 0; i < several && !PyErr_Occurred(); i++) {
            PyObject *rate = PyTuple_GetItem(given[2], i); /* an exception if it is no tuple, or too short */
            rates[i] = rate == NULL ? 0 : (float)PyFloat_AsDouble(rate);
        }
    if (!PyErr_Occurred() && several > 0) {
        Py_BEGIN_ALLOW_THREADS;
        (IS_WIDE ? each_wide : each_anywhere)(values, (float *const *)gradients, several, rates, count);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(gradients);
    PyMem_Free(rates);
    if (PyErr_Occurred())
        return NULL;
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
