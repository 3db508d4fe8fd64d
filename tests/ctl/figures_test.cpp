// vmemctl bench: when its figures are steady, and which setting it chooses by them.
#include "vmemctl/figures.h"

#include <gtest/gtest.h>

namespace {

using vmemctl::decide;
using vmemctl::Figure;
using vmemctl::Verdict;

Figure figure(std::initializer_list<double> samples) {
  Figure f;
  for (const double s : samples) f.add(s);
  return f;
}

TEST(CtlFigures, AFigureKnowsItsMiddleItsSpreadAndHowFarItMayBeOff) {
  const Figure f = figure({3, 1, 2, 5, 4});
  EXPECT_EQ(f.count(), 5u);
  EXPECT_EQ(f.median(), 3);
  EXPECT_EQ(f.low(), 1);
  EXPECT_EQ(f.high(), 5);
  EXPECT_NEAR(f.error(), 1.57 * 2 / 2.236 / 3, 1e-3);
  EXPECT_EQ(figure({7, 7, 7, 7, 7}).error(), 0);
  EXPECT_EQ(figure({1}).error(), 1) << "one alone says nothing";
  EXPECT_EQ(figure({0, 0, 0, 1, 1}).error(), 1);
  EXPECT_EQ(Figure().median(), 0);
  EXPECT_EQ(Figure().error(), 0);
}

TEST(CtlFigures, OneMeasurementFarOffMovesNeitherMiddleNorError) {
  const Figure calm = figure({100, 101, 99, 100, 100, 101, 99});
  Figure hit = calm;
  hit.add(5);
  EXPECT_NEAR(hit.median(), calm.median(), 1);
  EXPECT_LT(hit.error(), 0.02);
}

TEST(CtlFigures, MoreRoundsOfTheSameNoiseBecomeSteady) {
  Figure f;
  auto next = [&, i = 0]() mutable { f.add(95 + i++ * 7 % 11); };
  for (int i = 0; i < 5; ++i) next();
  EXPECT_GT(f.error(), 0.02);
  for (int i = 0; i < 400; ++i) next();
  EXPECT_LT(f.error(), 0.006);
}

TEST(CtlFigures, TheSmallestThatIsAsGoodAsTheBestIsChosen) {
  const Figure a = figure({50, 50, 50, 50, 50}), b = figure({96, 96, 96, 96, 96}),
               c = figure({100, 100, 100, 100, 100});
  const Verdict v = decide({&a, &b, &c}, 0.05);
  EXPECT_EQ(v.chosen, 1u);
  EXPECT_TRUE(v.steady);
}

TEST(CtlFigures, NothingIsDecidedOnFewRoundsOrOnNoise) {
  const Figure few = figure({100, 100, 100, 100}), many = figure({100, 100, 100, 100, 100});
  EXPECT_FALSE(decide({&few, &many}, 0.05).steady);
  const Figure noisy = figure({60, 80, 100, 120, 140});
  const Verdict v = decide({&many, &noisy}, 0.05);
  EXPECT_FALSE(v.steady);
  EXPECT_NEAR(v.error, noisy.error(), 1e-9);
  EXPECT_TRUE(decide({&many, &noisy}, 0.5).steady) << "where that much is accepted";
}

TEST(CtlFigures, NoiseOfWhatCannotBeChosenDoesNotMatter) {
  const Figure slow = figure({10, 20, 30, 25, 15}), good = figure({100, 101, 99, 100, 100});
  const Verdict v = decide({&slow, &good}, 0.05);
  EXPECT_TRUE(v.steady);
  EXPECT_EQ(v.chosen, 1u);
  // Its median is slow, but it may be as good as the best one; then the result is not steady.
  const Figure doubtful = figure({40, 60, 85, 130, 150});
  EXPECT_FALSE(decide({&doubtful, &good}, 0.05).steady);
}

}  // namespace
