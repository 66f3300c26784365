// One of several translation units (-DUNIT=N) that make a compiler need much memory: the heavy headers of the
// standard library, and many instances of its templates.
#include <algorithm>
#include <any>
#include <array>
#include <chrono>
#include <complex>
#include <deque>
#include <execution>
#include <filesystem>
#include <functional>
#include <future>
#include <iomanip>
#include <iostream>
#include <list>
#include <map>
#include <memory_resource>
#include <numeric>
#include <optional>
#include <random>
#include <ranges>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <valarray>
#include <variant>
#include <vector>

namespace heavy {

// A type of its own for every N, so that nothing below is instantiated twice.
template <int N>
struct value {
    long number;
    std::string name = std::to_string(N);
    auto operator<=>(const value &) const = default;
};

template <int N>
long work(std::mt19937_64 &random) {
    std::vector<value<N>> all(100);
    for (auto &one : all)
        one.number = static_cast<long>(random() % 1000);
    std::sort(all.begin(), all.end());
    std::stable_sort(all.rbegin(), all.rend(), [](const auto &a, const auto &b) { return a.name < b.name; });
    std::map<value<N>, std::vector<value<N>>> ordered;
    std::unordered_map<std::string, std::variant<value<N>, std::array<value<N>, 2>, long>> hashed;
    std::deque<std::tuple<int, value<N>>> queue;
    std::list<value<N>> list(all.begin(), all.end());
    for (auto &one : all) {
        ordered[one].push_back(one);
        hashed.emplace(one.name + std::to_string(one.number), one);
        queue.emplace_back(N, one);
    }
    list.sort();
    list.unique();
    std::function<long(long)> step = [&](long sum) {
        auto even = all | std::views::filter([](const auto &one) { return one.number % 2 == 0; }) |
                    std::views::transform([](const auto &one) { return one.number; });
        for (long number : even)
            sum += number;
        return sum;
    };
    long sum = step(static_cast<long>(ordered.size() + hashed.size() + queue.size() + list.size()));
    for (auto &[name, held] : hashed)
        sum += std::visit([](const auto &one) -> long { return sizeof one; }, held);
    return std::transform_reduce(std::execution::par, all.begin(), all.end(), sum, std::plus<>(),
                                 [](const auto &one) { return one.number; });
}

template <int... N>
long work_all(std::integer_sequence<int, N...>, std::mt19937_64 &random) {
    return (work<UNIT * 1000 + N>(random) + ...);
}

}  // namespace heavy

template <int N>
long entry(const std::string &text) {
    std::mt19937_64 random(N);
    long found = static_cast<long>(text.size());
#if INSTANCES > 2
    std::regex words("([a-z]+)-([0-9]+)");
    std::smatch match;
    if (std::regex_search(text, match, words))
        found += match.length();
#endif
    return found + heavy::work_all(std::make_integer_sequence<int, INSTANCES>(), random);
}

template long entry<UNIT>(const std::string &);
