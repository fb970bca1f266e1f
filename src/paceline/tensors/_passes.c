/* Passes over memory that torch would make twice: `fused_kernels.py` says what they are for, and checks what they are given.

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
#define LOOP __attribute__((target("avx2,fma"))) static /* `fused_kernels.py` asks torch whether the processor has these */
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

/* A step of an optimizer with state: `fused_optimizers.py` has the kinds, and says what each coefficient is. */

enum kind { SGD, MOMENTUM, NESTEROV, ADAM, ADAGRAD, RMSPROP, ADADELTA, ADAMAX, NADAM, RADAM, KINDS };
enum common { CLIP, COUNT, SIGN, DECAY, SHRINK, AVERAGING, COMMON };
#define OWN 8                    /* coefficients that a kind has of its own, at most */
#define COEFFICIENTS (COMMON + OWN)
#define STATES 3                 /* vectors of state, at most */

#define LERP(a, b, w) fmaf((w), (b) - (a), (a))

/* The gradient a kind steps on: the clipped mean, with weight decay in it. It may be in `total`. */
LOOP const float *prepare(float *restrict total, const float *const *gradients, Py_ssize_t several, Py_ssize_t at,
                          float *restrict values, const float *c, Py_ssize_t length) {
    const float *sum = gradients[0] + at;
    if (several > 1) {
        const float *restrict second = gradients[1] + at;
        for (Py_ssize_t i = 0; i < length; i++)
            total[i] = sum[i] + second[i];
        for (Py_ssize_t each = 2; each < several; each++) {
            const float *restrict gradient = gradients[each] + at;
            for (Py_ssize_t i = 0; i < length; i++)
                total[i] += gradient[i];
        }
        sum = total;
    }
    if (c[CLIP] != 1.0f) {
        for (Py_ssize_t i = 0; i < length; i++)
            total[i] = sum[i] * c[CLIP];
        sum = total;
    }
    if (c[COUNT] != 1.0f) {
        for (Py_ssize_t i = 0; i < length; i++)
            total[i] = sum[i] / c[COUNT];
        sum = total;
    }
    if (c[SIGN] != 1.0f) {
        for (Py_ssize_t i = 0; i < length; i++)
            total[i] = -sum[i];
        sum = total;
    }
    if (c[DECAY] != 0.0f) {
        for (Py_ssize_t i = 0; i < length; i++)
            total[i] = fmaf(c[DECAY], values[i], sum[i]);
        sum = total;
    }
    if (c[SHRINK] != 1.0f)
        for (Py_ssize_t i = 0; i < length; i++)
            values[i] *= c[SHRINK];
    return sum;
}

LOOP void step_kind(enum kind kind, const float *restrict g, float *restrict p, float *const *states, Py_ssize_t at,
                    const float *c, Py_ssize_t length) {
    float *restrict s = states[0] == NULL ? NULL : states[0] + at;
    float *restrict t = states[1] == NULL ? NULL : states[1] + at;
    float *restrict u = states[2] == NULL ? NULL : states[2] + at;
    float scale[BLOCK];
    c += COMMON;
    switch (kind) {
    case SGD: /* rate */
        for (Py_ssize_t i = 0; i < length; i++)
            p[i] = fmaf(c[0], g[i], p[i]);
        break;
    case MOMENTUM: /* rate, what is kept of the buffer, what goes in of the gradient */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = fmaf(c[2], g[i], c[1] * s[i]);
            p[i] = fmaf(c[0], s[i], p[i]);
        }
        break;
    case NESTEROV: /* the same, then momentum and share of the gradient in the step */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = fmaf(c[2], g[i], c[1] * s[i]);
            p[i] = fmaf(c[0], fmaf(c[3], s[i], c[4] * g[i]), p[i]);
        }
        break;
    case ADAM: /* -step size, 1 - beta1, beta2, 1 - beta2, 1 / root of the second correction, eps */
        for (Py_ssize_t i = 0; u == NULL && i < length; i++) {
            s[i] = LERP(s[i], g[i], c[1]);
            t[i] = c[2] * t[i] + c[3] * g[i] * g[i];
            p[i] += c[0] * s[i] / fmaf(sqrtf(t[i]), c[4], c[5]);
        }
        for (Py_ssize_t i = 0; u != NULL && i < length; i++) { /* amsgrad */
            s[i] = LERP(s[i], g[i], c[1]);
            t[i] = c[2] * t[i] + c[3] * g[i] * g[i];
            u[i] = t[i] > u[i] ? t[i] : u[i];
            p[i] += c[0] * s[i] / fmaf(sqrtf(u[i]), c[4], c[5]);
        }
        break;
    case ADAGRAD: /* -rate, eps */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] += g[i] * g[i];
            p[i] += c[0] * g[i] / (sqrtf(s[i]) + c[1]);
        }
        break;
    case RMSPROP: /* -rate, alpha, 1 - alpha, eps, momentum */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = c[1] * s[i] + c[2] * g[i] * g[i];
            scale[i] = s[i];
        }
        if (t != NULL) /* centered */
            for (Py_ssize_t i = 0; i < length; i++) {
                t[i] = LERP(t[i], g[i], c[2]);
                scale[i] -= t[i] * t[i];
            }
        for (Py_ssize_t i = 0; i < length; i++)
            scale[i] = g[i] / (sqrtf(scale[i]) + c[3]);
        if (u != NULL) /* momentum */
            for (Py_ssize_t i = 0; i < length; i++)
                scale[i] = u[i] = c[4] * u[i] + scale[i];
        for (Py_ssize_t i = 0; i < length; i++)
            p[i] = fmaf(c[0], scale[i], p[i]);
        break;
    case ADADELTA: /* -rate, rho, 1 - rho, eps */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = c[1] * s[i] + c[2] * g[i] * g[i];
            float delta = sqrtf(t[i] + c[3]) / sqrtf(s[i] + c[3]) * g[i];
            t[i] = c[1] * t[i] + c[2] * delta * delta;
            p[i] = fmaf(c[0], delta, p[i]);
        }
        break;
    case ADAMAX: /* -rate, 1 - beta1, beta2, eps */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = LERP(s[i], g[i], c[1]);
            float kept = c[2] * t[i], size = fabsf(g[i]) + c[3];
            t[i] = size > kept ? size : kept;
            p[i] += c[0] * s[i] / t[i];
        }
        break;
    case NADAM: /* -rate of the gradient, 1 - beta1, beta2, 1 - beta2, 1 / root of the second correction, eps, -rate of the
                   mean */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = LERP(s[i], g[i], c[1]);
            t[i] = c[2] * t[i] + c[3] * g[i] * g[i];
            p[i] += (c[0] * g[i] + c[6] * s[i]) / fmaf(sqrtf(t[i]), c[4], c[5]);
        }
        break;
    case RADAM: /* -rate by the first correction, 1 - beta1, beta2, 1 - beta2, eps, what rectifies, or 0 */
        for (Py_ssize_t i = 0; i < length; i++) {
            s[i] = LERP(s[i], g[i], c[1]);
            t[i] = c[2] * t[i] + c[3] * g[i] * g[i];
        }
        for (Py_ssize_t i = 0; i < length; i++)
            scale[i] = c[5] == 0.0f ? 1.0f : c[5] / (sqrtf(t[i]) + c[4]);
        for (Py_ssize_t i = 0; i < length; i++)
            p[i] += c[0] * s[i] * scale[i];
        break;
    case KINDS:
        break;
    }
}

/* Steps on the sum of the gradients, once, or on `each` of them in turn. New values are written to all targets, or over
   each gradient. `average`, if there is one, follows the values. */
LOOP void optimize_all(enum kind kind, float *restrict values, float *const *states, float *restrict average,
                       float *const *gradients, Py_ssize_t several, float *const *targets, Py_ssize_t writes,
                       const float *coefficients, int each, Py_ssize_t count) {
    float total[BLOCK];
    Py_ssize_t steps = each ? several : 1, summed = each ? 1 : several;
    for (Py_ssize_t at = 0; at < count; at += BLOCK) {
        Py_ssize_t length = count - at < BLOCK ? count - at : BLOCK;
        float *new = values + at;
        for (Py_ssize_t number = 0; number < steps; number++) {
            const float *c = coefficients + number * COEFFICIENTS;
            const float *g = prepare(total, (const float *const *)gradients + number, summed, at, new, c, length);
            step_kind(kind, g, new, states, at, c, length);
            if (average != NULL)
                for (Py_ssize_t i = 0; i < length; i++)
                    average[at + i] = LERP(average[at + i], new[i], c[AVERAGING]);
            if (each)
                memcpy(gradients[number] + at, new, (size_t)length * sizeof(float));
        }
        for (Py_ssize_t write = 0; write < writes; write++)
            memcpy(targets[write] + at, new, (size_t)length * sizeof(float));
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

static PyObject *optimize(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t number) {
    void *values, *average, **states = NULL, **gradients = NULL, **targets = NULL;
    float *coefficients = NULL;
    Py_ssize_t kind, count, held, several, writes;
    if (!takes("optimize", 9, number) || !read_count(given[0], &kind) || !read_address(given[1], &values) ||
        !read_address(given[3], &average) || !read_count(given[8], &count))
        return NULL;
    int each = PyObject_IsTrue(given[7]);
    if (each < 0)
        return NULL;
    if ((states = read_addresses(given[2], &held)) != NULL && (gradients = read_addresses(given[4], &several)) != NULL &&
        (targets = read_addresses(given[5], &writes)) != NULL &&
        (coefficients = read_rates(given[6], (each ? several : 1) * COEFFICIENTS)) != NULL) {
        if (kind < 0 || kind >= KINDS || held != STATES || several < 1) {
            PyErr_SetString(PyExc_ValueError, "there is no such kind, or there are too few states or gradients");
        } else {
            Py_BEGIN_ALLOW_THREADS;
            optimize_all((enum kind)kind, values, (float *const *)states, average, (float *const *)gradients, several,
                         (float *const *)targets, writes, coefficients, each, count);
            Py_END_ALLOW_THREADS;
        }
    }
    PyMem_Free(states);
    PyMem_Free(gradients);
    PyMem_Free(targets);
    PyMem_Free(coefficients);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"optimize", (PyCFunction)(void (*)(void))optimize, METH_FASTCALL,
     "optimize(kind, values, states, average, gradients, targets, coefficients, each, count): one step, or one on each."},
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
