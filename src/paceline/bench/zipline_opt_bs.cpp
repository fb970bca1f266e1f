// ZipLineOptBS as the paper describes it (Zhao et al. 2021, 5.2 and 5.3.2), to measure paceline.zipline.plan against.
//
// Omega: all ends of iterations as triples, sorted by time, then worker. Z: the latest of each worker, an array in that
// order. Its oldest is dropped by moving the array's beginning (5.3.1, case i). Any other is found by a binary search
// for the time at which the worker's iteration before ended, which the matrix tells, and the elements behind it are
// shifted by one (case ii). A wait is computed only when the oldest was dropped (Theorem 3).
//
// Z holds positions in Omega instead of the triples themselves: a quarter of the bytes to shift, which more than makes
// up for one more access to memory at each step of the search.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <vector>

namespace {

struct End {
    double time;
    int worker;
    int index;
};

bool before(const End& left, const End& right) {
    return std::tie(left.time, left.worker, left.index) < std::tie(right.time, right.worker, right.index);
}

}  // namespace

extern "C" void zipline_opt_bs(
    const double* matrix, int workers, int iterations, double* barrier, double* wait, int* stops) {
    const std::size_t columns = static_cast<std::size_t>(iterations);
    std::vector<End> omega;
    omega.reserve(static_cast<std::size_t>(workers) * columns);
    for (int worker = 0; worker < workers; ++worker) {
        for (int index = 0; index < iterations; ++index) {
            omega.push_back({matrix[static_cast<std::size_t>(worker) * columns + index], worker, index});
        }
    }
    std::sort(omega.begin(), omega.end(), before);

    // The window is [begin, end) of an array that is long enough never to wrap around.
    std::vector<int> window(omega.size());
    int* begin = window.data();
    int* end = begin;
    bool found = false;
    for (std::size_t place = 0; place < omega.size(); ++place) {
        const End& newest = omega[place];
        bool candidate = newest.index == 0;
        if (newest.index > 0) {
            candidate = omega[*begin].worker == newest.worker;
            if (candidate) {
                ++begin;
            } else {
                const std::size_t row = static_cast<std::size_t>(newest.worker) * columns;
                const End wanted{matrix[row + newest.index - 1], newest.worker, newest.index - 1};
                int* old = std::lower_bound(
                    begin, end, wanted, [&omega](int item, const End& value) { return before(omega[item], value); });
                std::memmove(old, old + 1, static_cast<std::size_t>(end - old - 1) * sizeof(int));
                --end;
            }
        }
        *end++ = static_cast<int>(place);
        if (candidate && end - begin == workers) {
            const double apart = newest.time - omega[*begin].time;
            if (!found || apart < *wait) {
                found = true;
                *wait = apart;
                *barrier = newest.time;
                for (const int* item = begin; item != end; ++item) {
                    stops[omega[*item].worker] = omega[*item].index;
                }
            }
        }
    }
}
